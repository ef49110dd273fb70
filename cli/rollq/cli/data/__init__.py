"""The demo's prompts: two tasks whose answers can be checked, as JSONL made by `rollq.cli.data.make_prompts`."""
