"""A disk that fills up in mid-run: one line, exit code 1, and the run can go on."""

import json
import shutil
import subprocess
import sys

import helpers
import pytest
from test_runs import VARYING, without_times

pytestmark = pytest.mark.slow

# Fills the small disk once the file, or the line of output, that is named is there.
SCRIPT = """
set -u
mount -t tmpfs -o size=64m tmpfs "$DISK"
attempt() {
    "$@" > "$OUT/$NAME.out" 2> "$OUT/$NAME.err" &
    train=$!
    until [ -e "$FILE" ] || grep -q "$LINE" "$OUT/$NAME.out"; do
        kill -0 $train 2> /dev/null || break
        sleep 0.002
    done
    cat /dev/zero > "$DISK/filler" 2> /dev/null
    wait $train
    echo $? > "$OUT/$NAME.code"
    rm -f "$DISK/filler"
}
NAME=checkpoint FILE="$DISK/run/checkpoints/latest/10" LINE="^never" attempt "$@"
NAME=result FILE=/none LINE="^scoring" attempt "$@"
"$@" > "$OUT/end.out" 2> "$OUT/end.err"
echo $? > "$OUT/end.code"
cp -r "$DISK/run" "$OUT/run"
"""


def can_mount(folder) -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", folder]
    return shutil.which("unshare") is not None and not subprocess.call(command)


def test_a_full_disk(finished, data_dir, tmp_path):
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    out.mkdir()
    if not can_mount(disk):
        pytest.skip("no small disk can be mounted here")
    flags = helpers.flags(helpers.tiny(data_dir, disk / "run"))
    command = [sys.executable, "-m", "lra_jax.train", *flags]
    environment = helpers.environment({"DISK": str(disk), "OUT": str(out)})
    subprocess.run(
        ["unshare", "-rm", "bash", "-c", SCRIPT, "train", *command],
        env=environment,
        check=True,
    )
    for name in ("checkpoint", "result"):
        code = int((out / f"{name}.code").read_text())
        error = (out / f"{name}.err").read_text()
        place = str(disk / "run")
        helpers.assert_one_error(code, error, 1, place, "No space left on device")
    assert (out / "end.code").read_text() == "0\n", (out / "end.err").read_text()
    result = json.loads((out / "run" / "result.json").read_text())
    for name, value in finished.result.items():
        if name not in VARYING:
            assert result[name] == value, name
    assert without_times(out / "run") == without_times(finished.workdir)


def test_a_checkpoint_that_the_system_refuses(data_dir, dataset, tmp_path):
    """A limit on the size of files, as a quota is one that no check foresees."""
    flags = helpers.flags(helpers.tiny(data_dir, tmp_path / "run"))
    script = 'ulimit -f 8; exec "$@"'
    command = [sys.executable, "-m", "lra_jax.train", *flags]
    ended = subprocess.run(
        ["bash", "-c", script, "train", *command],
        env=helpers.environment({"JAX_COMPILATION_CACHE_DIR": ""}),
        capture_output=True,
        text=True,
    )
    parts = "checkpoints/", "cannot be written, earlier ones are kept"
    helpers.assert_one_error(ended.returncode, ended.stderr, 1, *parts)
