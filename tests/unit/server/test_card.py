"""The signature under a card, verified by the SDK's own verifier."""

from pathlib import Path

import pytest
from a2a.utils.signing import InvalidSignaturesError, create_signature_verifier
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.server.app import ServerOptions
from codex_workspace.server.card import agent_card, card_signer

OPTIONS = ServerOptions("ä name", "Says it again.", "1", "http://127.0.0.1/", versions=("1.0",))

PLACE = ConfigLocation("config.yaml").at("a2a.signing_key_file")


def write_key(folder: Path, key: PrivateKeyTypes) -> Path:
    file = folder / "key.pem"
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return file


def test_a_signed_card_is_verified_and_a_changed_one_is_not(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    card = card_signer(write_key(tmp_path, key), PLACE)(agent_card(OPTIONS))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    verify = create_signature_verifier(lambda _kid, _jku: public, ["ES256"])
    verify(card)
    card.name = "another"
    with pytest.raises(InvalidSignaturesError):
        verify(card)


def test_a_key_of_another_type_is_rejected(tmp_path: Path) -> None:
    for key in (ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate()):
        with pytest.raises(ConfigError, match="contains no private key for ES256; create one with `openssl"):
            card_signer(write_key(tmp_path, key), PLACE)


def test_a_file_that_holds_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(ConfigError, match="contains no private key"):
        card_signer(tmp_path / "key.pem", PLACE)
    with pytest.raises(
        ConfigError, match=r"^config\.yaml: a2a\.signing_key_file: names .* cannot be read \(No such file"
    ):
        card_signer(tmp_path / "nothing.pem", PLACE)
