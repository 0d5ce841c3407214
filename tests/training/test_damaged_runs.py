"""A run directory that is not as it was written, file by file.

It is recovered to the same bits, or one line says which file is damaged, and how: there
is no traceback, and nothing changes in silence. Prepared data have a table of their own
in tests/data/test_damage.py.
"""

import json
import re
import shutil

import helpers
import pytest

from lra_jax import models, runs, seals
from lra_jax.training import metrics
from lra_jax.training import workdir as workdirs
from lra_jax.training.checkpoints import Checkpoints
from lra_jax.training.result import read_result
from lra_jax.training.session import Session
from lra_jax.training.trainer import Trainer

STEPS = helpers.TRAIN["steps"]
LATEST = f"checkpoints/latest/{STEPS}"
# Of the files of arrays, whose names are drawn, the first.
STATE = (
    *("_CHECKPOINT_METADATA", "commit_success.txt", "data/commit_success.txt"),
    *("data/process_0-of-1.json", "progress/_METADATA", "progress/commit_success.txt"),
    *("progress/d/*", "progress/manifest.ocdbt", "progress/ocdbt.process_0/d/*"),
    *("progress/ocdbt.process_0/manifest.ocdbt", "state/_METADATA", "state/_sharding"),
    *("state/array_metadatas/process_0", "state/commit_success.txt", "state/d/*"),
    *("state/manifest.ocdbt", "state/ocdbt.process_0/d/*"),
    *("state/ocdbt.process_0/manifest.ocdbt", seals.NAME),
)
BEST = (
    *("_CHECKPOINT_METADATA", "commit_success.txt", "params/_METADATA"),
    *("params/_sharding", "params/array_metadatas/process_0", "params/d/*"),
    *("params/commit_success.txt", "params/manifest.ocdbt", seals.NAME),
    *("params/ocdbt.process_0/d/*", "params/ocdbt.process_0/manifest.ocdbt"),
)

MODEL = ("model.safetensors", "model.json")


def each(names):
    """Every file in two ways, and some in every way."""
    wholly = ("state/d/*", "params/d/*", seals.NAME)
    return [
        (name, how)
        for name in names
        for how in helpers.DAMAGE
        if how in ("gone", "flipped") or name in wholly
    ]


@pytest.fixture(scope="module")
def foreign(data_dir, tmp_path_factory):
    """A run of the same model with another seed, as far as that one went."""
    workdir = tmp_path_factory.mktemp("foreign") / "run"
    config = helpers.tiny(data_dir, workdir, seed=1)
    with Session(config, quiet=True) as session:
        session.run()
    return session


@pytest.fixture(scope="module")
def shapes(finished, dataset, tmp_path_factory):
    """A trainer that was never trained, to restore into."""
    folder = tmp_path_factory.mktemp("shapes")
    return Trainer(finished.config, finished.task, dataset, folder)


@pytest.fixture(scope="module")
def earlier(finished, shapes):
    """The whole state at the checkpoint before the last."""
    with_one = shapes.workdir / "earlier"
    shutil.copytree(finished.workdir, with_one)
    shutil.rmtree(with_one / LATEST)
    return restored(with_one, shapes)[0]


@pytest.fixture
def copied(finished, tmp_path):
    """An unfinished copy of the run, to be damaged."""
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").unlink()
    return workdir


def restored(workdir, shapes):
    """State, progress and step with which a run goes on."""
    checkpoints = Checkpoints(workdir)
    try:
        return checkpoints.restore(shapes.state, shapes.data)
    finally:
        checkpoints.close()


def damage(workdir, foreign, below, pattern, how, theirs=None):
    """Damages the first file of the pattern; returns its name below the folder."""
    folder = workdir / below
    file = sorted(folder.glob(pattern))[0]
    other = sorted((foreign.workdir / (theirs or below)).glob(pattern))[0]
    helpers.damage(file, how, other)
    return file.relative_to(folder).as_posix()


def test_the_table_has_every_file(finished):
    best = f"checkpoints/best/{finished.result.best_step}"
    known = {"config.json", "metrics.jsonl", "result.json", ".lock", *MODEL}
    known |= {f"{LATEST}/{name}" for name in STATE}
    known |= {f"checkpoints/latest/{STEPS - 10}/{name}" for name in STATE}
    known |= {f"{best}/{name}" for name in BEST}
    found = {p.relative_to(finished.workdir) for p in finished.workdir.rglob("*")}
    files = [p for p in found if (finished.workdir / p).is_file()]
    unknown = [p for p in files if not any(p.match(name) for name in known)]
    assert not [p for p in unknown if p.parts[0] not in ("events", "curves.png")]
    assert all(list(finished.workdir.glob(name)) for name in known)


@pytest.mark.parametrize(("name", "how"), each(STATE))
def test_the_newest_checkpoint(
    finished, foreign, shapes, earlier, copied, caplog, name, how
):
    """The one before it is taken, and a line names the file."""
    unchanged = shutil.copytree(copied / LATEST, copied.parent / "unchanged")
    place = damage(copied, foreign, LATEST, name, how)
    same = (copied / LATEST / place).exists() and (
        (copied / LATEST / place).read_bytes() == (unchanged / place).read_bytes()
    )
    state, progress = restored(copied, shapes)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("lra_jax")]
    if same or (name, how) == (seals.NAME, "gone"):
        assert not lines and progress == finished.trainer.progress
        helpers.assert_equal_trees(state, finished.trainer.state)
        return
    (line,) = lines
    assert line.startswith(f"{copied / LATEST}: expected a whole checkpoint, got ")
    assert line.endswith("going back to step 30") and "\n" not in line
    assert place in line or (name, how) == (seals.NAME, "foreign")
    helpers.assert_equal_trees(state, earlier)


# Orbax leaves tasks behind when a load fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("state/_METADATA", how) for how in ("gone", "cut", "flipped")),
        *(("state/manifest.ocdbt", how) for how in ("gone", "cut", "flipped")),
        ("data/process_0-of-1.json", "flipped"),
    ],
)
def test_without_a_seal(foreign, shapes, earlier, copied, caplog, name, how):
    """Orbax finds the damage, and the checkpoint before is taken."""
    damage(copied, foreign, LATEST, name, how)
    (copied / LATEST / seals.NAME).unlink()
    state, _ = restored(copied, shapes)
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("lra_jax")
    ]
    assert line.startswith(f"{copied / LATEST}: expected a whole checkpoint, got ")
    assert line.endswith("going back to step 30") and "\n" not in line
    helpers.assert_equal_trees(state, earlier)
    (aside,) = (copied / "checkpoints" / "damaged").iterdir()
    assert aside.name.startswith(f"{STEPS}-")


@pytest.mark.parametrize("how", helpers.DAMAGE)
@pytest.mark.parametrize("name", MODEL)
def test_the_model_in_a_file(foreign, copied, name, how):
    damage(copied, foreign, ".", name, how)
    with pytest.raises(ValueError, match="expected ") as error:
        models.load(copied)
    assert str(copied) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "how"), each(BEST))
def test_the_best_checkpoint(finished, foreign, shapes, copied, name, how):
    """It is found before the run goes on."""
    best, theirs = (
        f"checkpoints/best/{run.result.best_step}" for run in (finished, foreign)
    )
    before = [(finished.workdir / best).glob(name), (copied / best).glob(name)]
    place = damage(copied, foreign, best, name, how, theirs)
    one, two = (sorted(files) for files in before)
    same = how == "foreign" and one[0].read_bytes() == two[0].read_bytes()
    if same or (name, how) == (seals.NAME, "gone"):
        state, _ = restored(copied, shapes)
        helpers.assert_equal_trees(state, finished.trainer.state)
        return
    with pytest.raises(ValueError, match=f"^{copied / best}: expected ") as error:
        restored(copied, shapes)
    assert "\n" not in str(error.value)
    assert place in str(error.value) or (name, how) == (seals.NAME, "foreign")


@pytest.mark.parametrize("how", helpers.DAMAGE)
def test_config(finished, foreign, shapes, copied, how):
    helpers.damage(copied / "config.json", how, foreign.workdir / "config.json")
    before = finished.config, finished.dataset.fingerprint
    for read in (
        lambda: workdirs.open_workdir(copied, *before),
        lambda: restored(copied, shapes),
    ):
        try:
            read()
        except ValueError as error:
            assert str(copied) in str(error) and "\n" not in str(error)
            return
    config, fingerprint = workdirs.read_config(copied)
    assert (config.identity(), fingerprint) == (before[0].identity(), before[1])


def test_a_changed_setting_is_not_scored(shapes, copied):
    """Of the same shapes: the checkpoint knows its run."""
    values = json.loads((copied / "config.json").read_text())
    values["attention"] = "linear"
    (copied / "config.json").write_text(json.dumps(values))
    checkpoints = Checkpoints(copied, clean=False)
    wanted = "a checkpoint of the run in config.json, got one of other settings"
    for which in ("best", "last"):
        with pytest.raises(ValueError, match=wanted):
            checkpoints.load_params(which, shapes.state)
    checkpoints.close()


@pytest.mark.parametrize("how", helpers.DAMAGE)
def test_metrics(finished, foreign, copied, how):
    file = copied / "metrics.jsonl"
    helpers.damage(file, how, foreign.workdir / "metrics.jsonl")
    seal, _ = seals.read(copied / LATEST)
    try:
        line = metrics.changed_metrics(copied, STEPS, 4, seal)
    except ValueError as error:
        line = str(error)
    assert re.match(f"{file}(, line [0-9]+)?: expected .*, got ", line), line
    assert "\n" not in line


@pytest.mark.parametrize("how", helpers.DAMAGE)
def test_result(finished, foreign, tmp_path, how):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    file = workdir / "result.json"
    helpers.damage(file, how, foreign.workdir / "result.json")
    if how == "gone":
        assert read_result(workdir) is None
        return
    with pytest.raises(ValueError, match=f"^{file}: (.*: )?expected ") as error:
        read_result(workdir)
    assert "\n" not in str(error.value)


def test_any_changed_number_of_a_result_is_found(finished, tmp_path):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    plan = runs.Planned(finished.config, workdir, (), "")
    assert runs.finished_result(plan) == finished.result
    written = json.loads((workdir / "result.json").read_text())
    for name, value in written.items():
        if isinstance(value, float) or (isinstance(value, int) and value > 1):
            changed = json.dumps(written | {name: value - 0.5})
            (workdir / "result.json").write_text(changed)
            with pytest.raises(ValueError, match="as it was written, got other values"):
                read_result(workdir)
            assert runs.finished_result(plan) is None


@pytest.mark.parametrize("how", helpers.DAMAGE)
def test_lock(copied, foreign, how):
    """Its content is nobody's."""
    helpers.damage(copied / ".lock", how, foreign.workdir / ".lock")
    with workdirs.exclusive(copied):
        pass
