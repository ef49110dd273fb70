"""Names of runs, tasks and evaluations, which must be plain because they are part of keys in Redis. Pure."""

import re


def plain_name(name: str, longest: int = 40) -> str:
    """`name`, with a dash in place of each run of characters that a name cannot have."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:longest].strip("-.")
    return f"{plain}-run" if plain.endswith(".toml") else plain or "run"


def dotted(name: str, module: str) -> str:
    """The dotted path of a function for the user to write, in a module beside `rollq.toml`."""
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "function"
    return f"{module}.{f'_{plain}' if plain[0].isdigit() else plain}"
