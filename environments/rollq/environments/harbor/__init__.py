"""Tasks in Harbor's layout: a folder per task with an instruction, files and tests, which run after the agent's
command."""
