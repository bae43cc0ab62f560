"""Files as torch writes them, made without torch."""

from __future__ import annotations

import zipfile
from pathlib import Path


def torch_file(path: Path, shape: int, offset: int = 0) -> Path:
    """What `torch.save` would write of {"fc.weight": tensor} on 16 bytes, wherever that points."""
    dense = f"I{offset}\n(I{shape}\ntp0\n(I1\ntp1\n".encode()
    storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI4\ntQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + dense + b"I00\nN" + b"tR"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"(dS'fc.weight'\n" + tensor + b"s.")
        archive.writestr("x/data/0", bytes(16))
    return path
