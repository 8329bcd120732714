"""Writes tests/ckpt/golden/all_dtypes.safetensors with the Python library: every element type that torch and the format
share, names that need escaping, empty and scalar tensors, metadata. The C++ test reads it and writes the same bytes."""

import pathlib
import sys

import torch
from safetensors.torch import save_file

DTYPES = """float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool
float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz complex64""".split()


def main(out: pathlib.Path) -> None:
    tensors = {}
    for number, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        count = 5 * torch.empty((), dtype=dtype).element_size()
        raw = (torch.arange(count, dtype=torch.int32) * 37 + number).to(torch.uint8)
        if dtype is torch.bool:
            raw = raw % 2
        tensors[f"t.{name}"] = raw.view(dtype)
    tensors["b.float32"] = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    tensors["a.float32"] = torch.arange(7, dtype=torch.float32)
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors['naïve "x"\\\n\t\x01\x7f/日本'] = torch.ones(1, dtype=torch.bfloat16)
    # One key only: with several, the library's own order differs from run to run.
    save_file(tensors, out, {"format": "pt"})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
