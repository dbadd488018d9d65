"""Text files: what a user names and this project reads."""

from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file; ``ValueError`` naming it and why it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error})") from error
