"""A backend of vLLM's weight transfer that works on the CPU: all of vLLM's path but NCCL's broadcasts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from support.gloo_group import GlooProcessGroup, come


@dataclass
class GlooInitInfo:
    """As `NCCLWeightTransferInitInfo`, without what packs."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int


class GlooTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's NCCL engine with another group; it loads in the same steps."""

    init_info_cls = GlooInitInfo

    def init_transfer_engine(self, init_info: Any) -> None:
        self.group: GlooProcessGroup | None = come(vars(init_info))

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        parsed: NCCLWeightTransferUpdateInfo = self.parse_update_info(dict(update_info))
        assert self.group is not None, "the group is met first"
        for named in self.group.receive(vars(parsed)):
            self.model.load_weights([named])

    def shutdown(self) -> None:
        self.group = None


def register() -> None:
    """Make it known as `gloo` in this process. vLLM calls it in each of its own, as a plugin."""
    WeightTransferEngineFactory.register_engine("gloo", GlooTransferEngine)


def install(folder: Path) -> None:
    """Make `folder`, which is on the path, tell vLLM of `register`, as an installed package does."""
    about = folder / "gloo_transfer-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-transfer\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo_transfer = support.gloo_transfer:register\n")
