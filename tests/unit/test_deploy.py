"""What `deploy/` says is what the project and the release take."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict]:
    """The objects by their kind."""
    objects = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    return {each["kind"]: each for each in objects}


@pytest.fixture(scope="module")
def recipe() -> list[tuple[str, str]]:
    """Instructions of the container file."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy" / "Containerfile").read_text(), flags=re.M)
    lines = text.replace("\\\n", "").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line]


def entrypoint(recipe: list[tuple[str, str]]) -> list[str]:
    (words,) = [json.loads(rest) for name, rest in recipe if name == "ENTRYPOINT"]
    return words[words.index("sglang.launch_server") + 1 :]


def test_arguments(manifest: dict[str, dict], recipe: list[tuple[str, str]]) -> None:
    """The release parses them, and asks for as many GPUs as the container gets."""
    from sglang.srt.server_args import ServerArgs

    (container,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args([*entrypoint(recipe), *container["args"]])
    assert args.speculative_algorithm == "DFLASH" and args.host == "0.0.0.0"
    assert (
        container["resources"]["limits"]["nvidia.com/gpu"]
        == args.tensor_parallel_size * args.data_parallel_size
    )
    assert [port["containerPort"] for port in container["ports"]] == [args.port]
    assert ("EXPOSE", str(args.port)) in recipe


def test_probes_and_service(manifest: dict[str, dict]) -> None:
    from sglang.srt.entrypoints.http_server import app

    spec = manifest["Deployment"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    names = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert (
            asked["path"] in {getattr(route, "path", None) for route in app.routes}
            and asked["port"] in names
        )
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"] == manifest["Service"]["spec"]["selector"]
    assert {port["targetPort"] for port in manifest["Service"]["spec"]["ports"]} <= names
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_recipe(recipe: list[tuple[str, str]]) -> None:
    """Copies what is there or what `make wheels` writes; the environment is that of `make serve`."""
    makefile = (ROOT / "Makefile").read_text()
    sources = {rest.split()[0] for name, rest in recipe if name == "COPY"}
    written = re.search(r"^DIST +\?= (\S+)$", makefile, re.M)[1] + "/*.whl"
    assert written in sources
    assert all((ROOT / source).is_file() for source in sources - {written})
    variables = {word for name, rest in recipe if name == "ENV" for word in shlex.split(rest)}
    assert set(re.search(r"^ENV_cuda +=(.*)$", makefile, re.M)[1].split()) <= variables
    worker = {"SGLANG_ENABLE_SPEC_V2=1", "SGLANG_ENABLE_DFLASH_SPEC_V2=1"}
    assert worker <= variables
