"""Tasks in Harbor's layout: an instruction, files and tests in a folder each, judged after the agent's command."""
