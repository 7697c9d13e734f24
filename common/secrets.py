"""Which names and values are secrets, and text without them. Torch-free."""

import os
import re

# Variables of these names are no secrets: they say where a secret is, or how long.
_HARMLESS = re.compile(
    r"_(FILE|PATH|DIR|NAME|URL|SOCK|ID|TYPE|SIZE|LEN|LENGTH|COUNT|LIMIT|HEADS|MODE)S?\d*$"
    r"|^(OLD)?PWD$|(^|_)(EOS|BOS|PAD|UNK|SEP|CLS|MASK)_TOKEN$"
)
_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|SIGNATURE|CONNECTION_STRING"
    r"|(API|AUTH|ACCESS|PRIVATE|SSH)_?(KEY|TOKEN|PASS)"
    r"|(?<![A-Z])(KEY|TOKEN|AUTH|PASS|PWD|PAT|JWT|SIG|BEARER)(?![A-Z])"
)
# Shorter values of variables occur in ordinary text by chance.
_SHORTEST = 8

# user:password@ of a URL, or a token alone; a number after the colon is a port, no password.
_URL_USER = re.compile(r"(?<=://)(?:[^\s/@:]*:(?!\d+/)[^\s@]*|[^\s/@]+)@")
_URL_PASSWORD = re.compile(r"https?://[^\s/@]+@|://[^\s/@:]*:(?!\d+/)[^\s@]+@")
_QUERY = re.compile(r"(?<=[?&;])([\w-]+)=([^\s&;#'\"]+)")
_VALUE = r"('[^']*'|\"[^\"]*\"|[^\s,'\"]+)"
_FLAG = re.compile(rf"(?<![\w-])--?([A-Za-z][\w-]*)(=|\s+)(?!-){_VALUE}")
_ASSIGNED = re.compile(rf"\b([A-Z][A-Z0-9_]*|[a-z0-9]+(?:_[a-z0-9]+)+)={_VALUE}")


def is_secret(name: str) -> bool:
    """Whether the value of a variable, flag or field of this name must not be shown."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").upper()
    return bool(_SECRET.search(words)) and not _HARMLESS.search(words)


def has_credentials(text: str) -> bool:
    """Whether there is a password, a token or a signature in a URL, or in ``NAME=value``."""
    named = (name for pattern in (_QUERY, _ASSIGNED) for name, _ in pattern.findall(text))
    return bool(_URL_PASSWORD.search(text)) or any(map(is_secret, named))


def _mask_value(match: re.Match[str]) -> str:
    if not is_secret(match[1]):
        return match[0]
    # The last group of each pattern is the value.
    return match[0][: match.start(match.re.groups) - match.start()] + "***"


def masked(text: str) -> str:
    """``text`` with ``***`` for each secret, known by its name or from the environment."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and is_secret(name):
            text = text.replace(value, "***")
    text = _URL_USER.sub("***@", text)
    for pattern in (_QUERY, _FLAG, _ASSIGNED):
        text = pattern.sub(_mask_value, text)
    return text
