"""Signs the agent card with the operator's ES256 key; imported only if signing is on."""

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
    """Return a function that signs a card with the private key in a PEM file; `place` is the setting's location.

    The signature's `kid` is the start of the SHA-256 of the public key (DER, SubjectPublicKeyInfo).

    Raises:
        ConfigError: the file cannot be read, or contains no ES256 key.
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
    # jku is left out: it must be an HTTPS URL of the key, and null is not valid.
    header: ProtectedHeader = {"alg": "ES256", "kid": sha256(public).hexdigest()[:16], "typ": "JOSE"}  # type: ignore[typeddict-item]
    sign: Callable[[AgentCard], AgentCard] = create_agent_card_signer(pem, header)
    return sign


def _es256(pem: bytes) -> EllipticCurvePrivateKey | None:
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP256R1) else None
