"""Numbers of things in words. Pure."""


def count(number: int, noun: str) -> str:
    """A number of things, `noun` in the plural unless there is one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
