"""The machine report: what it says and what it must not say."""

import getpass
import json
import os
import platform
import socket

import torch

from stretto.record.environment import as_json, as_text, environment


def test_the_report_tells_versions_threads_and_commit():
    report = environment()
    assert report["packages"]["torch"] == torch.__version__
    assert report["python"] == platform.python_version()
    assert report["threads"] == torch.get_num_threads()
    assert report["memory_bytes"] > 2**20
    assert json.loads(as_json(report)) == report


def test_the_text_has_a_line_for_every_entry():
    report = environment()
    lines = as_text(report).splitlines()
    assert len(lines) == len(report) - 1 + len(report["packages"])
    assert any(line.startswith("torch ") and torch.__version__ in line for line in lines)
    assert as_text({"a": None, "devices": [], "packages": {}}) == "a        not there\ndevices  none\n"


def test_the_report_gives_away_neither_host_nor_user_nor_home():
    text = as_json(environment())
    secrets = {socket.gethostname(), os.path.expanduser("~"), os.getcwd()} - {"", "/", "localhost"}
    assert not [secret for secret in secrets if secret in text]
    assert f'"{getpass.getuser()}"' not in text
