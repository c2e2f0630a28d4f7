"""The C kernels: built where there is a compiler, left out where there is none (torch then serves)."""

from pathlib import Path

from setuptools import Extension, setup

KERNELS = "src/quafl/codec/kernels"

setup(
    ext_modules=[
        Extension(
            "quafl.codec.kernels._kernels",
            sources=[f"{KERNELS}/kernels.c"],
            depends=[str(path) for path in Path(KERNELS).glob("*.h")],
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)
