"""What pyproject.toml cannot say: the recipes of conf/ are installed as data of the package rlhf."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["rlhf*", "actors*", "jobs*"]), "rlhf.conf"],
    package_dir={"rlhf.conf": "conf"},
    package_data={"rlhf.conf": ["*.yaml"], "jobs.report": ["page.*"]},
)
