"""The C kernel: built where there is a compiler, left out where there is none (torch then serves)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "quafl.codec.kernels._lattice",
            sources=["src/quafl/codec/kernels/lattice.c"],
            depends=["src/quafl/codec/kernels/lattice_body.h"],
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)
