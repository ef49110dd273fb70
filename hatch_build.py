"""Compiles the fast path of the codec while rollq is installed. Without a C compiler, rollq is installed without it."""

import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension

MODULE = "rollq.buffer.wire._plain"
SOURCE = "buffer/rollq/buffer/wire/_plain.c"


class CompiledCodec(BuildHookInterface[Any]):
    """Adds the compiled module to a wheel, or puts it beside its source for an editable install."""

    PLUGIN_NAME = "custom"
    _built: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the module; a failure leaves a wheel of Python alone."""
        folder = Path(self.root, SOURCE).parent if version == "editable" else Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        built = compile_into(folder, Path(self.root))
        if built is None:
            self.app.display_warning("rollq is installed without its compiled codec: there is no working C compiler")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            self._built = built
            build_data["force_include"][str(built)] = f"rollq/buffer/wire/{built.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the file that the wheel has now."""
        del version, build_data, artifact_path
        if self._built:
            self._built.unlink()


def compile_into(folder: Path, root: Path) -> Path | None:
    """Compile the module into `folder`; returns its file, None if it cannot be compiled."""
    source = root / SOURCE
    checksum = [("SOURCE", str(zlib.crc32(source.read_bytes())))]  # a module of other source is not used
    extension = Extension(MODULE, [str(source)], define_macros=checksum, extra_compile_args=["-O3"], optional=True)
    with tempfile.TemporaryDirectory() as scratch:
        command: Any = Distribution({"ext_modules": [extension]}).get_command_obj("build_ext")
        command.build_lib = command.build_temp = scratch
        command.ensure_finalized()
        command.run()
        compiled = Path(scratch, command.get_ext_filename(MODULE))
        if not compiled.is_file():
            return None
        target = folder / compiled.name
        target.unlink(missing_ok=True)  # a process may have the old one open
        target.write_bytes(compiled.read_bytes())
        return target
