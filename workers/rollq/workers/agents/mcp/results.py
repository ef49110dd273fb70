"""The result of an MCP server's tool, as text for the model. Pure."""

from collections.abc import Mapping
from typing import Any

from rollq.buffer.common import exact_json


def result_text(result: Mapping[str, Any]) -> str:
    """The text of a `tools/call` result in JSON: the blocks, one per line, or the structured content if there are no
    blocks.

    Images, sounds and files appear by name only.
    """
    blocks = [_block_text(block) for block in result.get("content") or ()]
    if not blocks and result.get("structuredContent") is not None:
        return exact_json.dumps(result["structuredContent"]).decode()
    return "\n".join(blocks)


def _block_text(block: Mapping[str, Any]) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case {"type": "resource", "resource": {"uri": uri}}:
            return f"[{uri}: a file, which cannot be shown]"
        case {"type": "resource_link", "uri": uri}:
            return f"[{block.get('name', 'a resource')}: {uri}]"
        case {"type": kind}:
            form = f" ({block['mimeType']})" if "mimeType" in block else ""
            return f"[{kind}{form}, which cannot be shown]"
    return ""
