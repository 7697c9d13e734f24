"""What a person is told who gave bad input. Torch-free."""

from common.secrets import masked
from common.text import printable


class ConfigError(Exception):
    """Bad input; the message is one line that names the flag, the value and the fix.

    ``location`` is the place of the value in its section, where it has one.
    """

    def __init__(self, message: str, location: tuple[str | int, ...] = ()):
        super().__init__(printable(masked(message)))
        self.location = location


class LayoutError(ConfigError):
    """A layout that cannot be built, in one line with the flag, both numbers and the fix."""
