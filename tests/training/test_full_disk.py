"""A disk that fills up in mid-run: one line, exit code 1, and the run can go on."""

import json
import shutil
import subprocess
import sys

import helpers
import pytest
from test_runs import VARYING, without_times

pytestmark = pytest.mark.slow

# Fills the small disk after the first checkpoint; then a start on the full disk, and
# one when there is room again.
SCRIPT = """
set -u
mount -t tmpfs -o size=64m tmpfs "$DISK"
attempt() {
    "${@:2}" > "$OUT/$1.out" 2> "$OUT/$1.err"
    echo $? > "$OUT/$1.code"
}
attempt checkpoint "$@" &
until [ -e "$DISK/run/checkpoints/latest/10" ] || [ -e "$OUT/checkpoint.code" ]; do
    sleep 0.002
done
cat /dev/zero > "$DISK/filler" 2> /dev/null
wait
attempt start "$@"
rm "$DISK/filler"
attempt end "$@"
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
    wanted = {"checkpoint": (1, "No space left on device"), "start": (2, "are free at")}
    for name, (code, reason) in wanted.items():
        ended = int((out / f"{name}.code").read_text())
        error = (out / f"{name}.err").read_text()
        helpers.assert_one_error(ended, error, code, str(disk / "run"), reason)
    assert (out / "end.code").read_text() == "0\n", (out / "end.err").read_text()
    result = json.loads((out / "run" / "result.json").read_text())
    for name, value in finished.result.to_dict().items():
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
