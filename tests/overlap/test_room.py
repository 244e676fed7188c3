"""The room stands alone: it needs torch and nothing else, and keeps no setting in the environment."""

import re
import subprocess
import sys
from pathlib import Path

import stretto.overlap

ROOM = Path(stretto.overlap.__file__).parent


def test_importing_the_room_loads_no_other_room_and_no_extra() -> None:
    code = (
        "import sys, stretto.overlap; "
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('diffusers', 'transformers', 'peft', 'safetensors', 'sklearn', 'PIL') "
        "or (m.startswith('stretto.') and not m.startswith('stretto.overlap'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_no_environment_variable_is_read() -> None:
    for path in ROOM.glob("*.py"):
        assert not re.search(r"environ|getenv", path.read_text()), path.name


def test_what_is_public_exists_and_is_documented() -> None:
    for name in stretto.overlap.__all__:
        assert getattr(stretto.overlap, name).__doc__, name


def test_files_stay_short() -> None:
    for path in ROOM.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 300, path.name
