"""Ray with mutual TLS, by the recipe of docs/tls.md: only a driver with a certificate of its authority works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.kvpool.programs import free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tls.md"
RAY = str(Path(sys.executable).with_name("ray"))
DRIVER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("answer", ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote()))
"""
"""Its task needs no CPU of the head's one."""

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def certificates(folder: Path) -> dict[str, str]:
    """Made by the page's own lines; the variables that name them."""
    recipe = next(block for block in re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL) if "openssl" in block)
    folder.mkdir()
    subprocess.run(("bash", "-euc", recipe), cwd=folder, capture_output=True, check=True)
    assert (folder / "node.key").stat().st_mode & 0o777 == 0o600
    names = {"SERVER_CERT": "node.crt", "SERVER_KEY": "node.key", "CA_CERT": "ca.crt"}
    found = {f"RAY_TLS_{key}": str(folder / name) for key, name in names.items()}
    return found | {"RAY_USE_TLS": "1", "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Address of a head with TLS, and the variables of its certificates."""
    ours = certificates(tmp_path_factory.mktemp("tls") / "ours")
    port = free_port("127.0.0.1")
    arguments = (RAY, "start", "--head", "--block", "--num-cpus=1", "--include-dashboard=false", f"--port={port}")
    process = subprocess.Popen(arguments, env=os.environ | ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"127.0.0.1:{port}", ours
    process.terminate()
    process.wait(300)


def driver(address: str, variables: dict[str, str], wait_s: float) -> subprocess.CompletedProcess | None:
    """A driver that has ended, or None if it has not after `wait_s`."""
    command = (sys.executable, "-c", DRIVER, address)
    try:
        return subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=wait_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None


def test_a_driver_with_a_certificate_works_and_one_of_another_authority_does_not(head, tmp_path):
    address, ours = head
    for _ in range(6):  # the head may still be starting
        done = driver(address, ours, 90)
        if done is not None and done.returncode == 0:
            break
    assert done is not None and "answer 42" in done.stdout, done
    refused = driver(address, certificates(tmp_path / "others"), 20)
    assert refused is None or (refused.returncode != 0 and "answer" not in refused.stdout)
