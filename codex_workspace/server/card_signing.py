"""The signature under an agent's card: ES256, by a key of the operator's."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from a2a.types import AgentCard
from a2a.utils.signing import ProtectedHeader, create_agent_card_signer
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from codex_workspace.common.errors import ConfigLocation


def card_signer(file: Path, place: ConfigLocation) -> Callable[[AgentCard], AgentCard]:
    """Return what puts a signature under a card, with the private key that a PEM file holds; `place` names the file.

    The signature's `kid` is the start of the SHA-256 of the public key (DER, SubjectPublicKeyInfo).

    Raises:
        ConfigError: the file cannot be read, or holds no key for ES256.
    """
    try:
        pem = file.read_bytes()
    except OSError as error:
        raise place.error(
            f"names {file}, which cannot be read ({error.strerror}); it must be a PEM file that this user may read"
        ) from error
    key = _es256(pem)
    if key is None:
        raise place.error(
            f"names {file}, which holds no private key for ES256; "
            "make one with `openssl ecparam -name prime256v1 -genkey -noout`"
        )
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    # jku is left out, as it would have to name an HTTPS address with the key; a null would be no URL.
    header: ProtectedHeader = {"alg": "ES256", "kid": sha256(public).hexdigest()[:16], "typ": "JOSE"}  # type: ignore[typeddict-item]
    sign: Callable[[AgentCard], AgentCard] = create_agent_card_signer(pem, header)
    return sign


def _es256(pem: bytes) -> EllipticCurvePrivateKey | None:
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP256R1) else None
