"""Whatever a user can get wrong is one line that says what, and leaves nothing.

One table of commands and one of calls: each has exit code 2, or is a ``ValueError``,
with the name, what was expected and what came.
"""

import contextlib
import json
import math
import os
import re
import string
import sys
from typing import Any

import helpers
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lra_jax import analyze, benchmark, evaluate, report, sweep, train
from lra_jax.attention import __main__ as attention_command
from lra_jax.cli import parse_config
from lra_jax.configs import Config, get_preset
from lra_jax.configs.base import flatten
from lra_jax.data import __main__ as data_command
from lra_jax.data import buckets
from lra_jax.data.stages import LengthWarmup
from lra_jax.models.config import parse_options
from lra_jax.tasks import get_task
from lra_jax.training import workdir as workdirs
from lra_jax.training.result import read_result

COMMANDS = {
    **{"train": train, "evaluate": evaluate, "sweep": sweep, "report": report},
    **{"benchmark": benchmark, "analyze": analyze, "data": data_command},
    "attention": attention_command,
}


def refused(capsys: Any, line: str, *parts: str) -> None:
    """A command line that ends in one line of the one form, with these parts."""
    name, *args = line.split()
    kept = re.search("--task=(mqar|parity|lm|needle|mad)|--data.dir", line)
    if name == "train" and not kept:  # Should it come so far, it ends there.
        args.insert(0, "--data.dir=/dev/null/x")
    with pytest.raises(SystemExit) as stop:
        COMMANDS[name].main(args)
    out, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 2, ": expected ", ", got ", *parts)
    assert out == ""


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path, monkeypatch):
    """Whatever is refused has left no file."""
    monkeypatch.chdir(tmp_path)
    yield
    assert [path for path in tmp_path.iterdir() if path.name != "run"] == []


LINES = r"""
train --zzz ~ --zzz: expected a flag, got an unknown one; --help lists them
train --train.step=3 ~ did you mean '--train.steps'?
train --lrr=3 ~ did you mean '--lr'?
train --max-len=9 ~ did you mean '--model.max_length' or '--data.max_length'?
train --data.batch_size=3 ~ got an unknown one; did you mean '--train.batch_size'?
train --steps=9 --train.steps=90 ~ --train.steps: expected one form of the flag
train -- ~ --: expected a flag
train --task=listop ~ did you mean 'listops'?
train --task= ~ --task: expected one of
train --preset=oficial ~ did you mean 'official'?
train --workdir= ~ --workdir: expected a name, got ''
train --workdir=run[2] ~ --workdir: expected a path without * ? [ \
train --data.dir=data[1] ~ --data.dir: expected a path without * ? [ \
train --data.dir= ~ --data.dir: expected a name, got ''
train --seed=-1 ~ --seed: expected 0 or a positive int, got -1
train --seed=99999999999999999999 ~ --seed: expected a number of at most 2147483647
train --seeds=0 ~ --seeds: expected 1 to 1000, got 0
train --dry_run --seeds=2 ~ --dry_run: expected one run
train --coordinator=host:1 ~ --distributed: expected True
train --distributed --coordinator=host ~ --coordinator: expected HOST:PORT, got 'host'
train --train.steps=0 ~ --train.steps: expected a positive int, got 0
train --train.steps=9 --train.warmup=9 ~ --train.warmup: expected less than
train --train.adam_b1=1 ~ --train.adam_b1: expected a number in [0, 1)
train --preset=compact --train.seq_devices=2 --attention=softmax ~ expected one of lin
train --train.length_warmup=128:2 ~ --train.length_warmup: expected LENGTH:FRACTION
train --train.curriculum=100:0.5,50:0.6 ~ --train.curriculum: expected LENGTH:FRACTION
train --model.num_heads=3 ~ --model.num_heads: expected a divisor of
train --model.num_layers=1001 ~ --model.num_layers: expected 1 to 1000, got 1001
train --model.max_length=10 ~ --model.max_length: expected at least 2000
train --data.max-length=2001 ~ --model.max_length: expected at least 2001
train --model.positions=learned_2d ~ --model.positions: expected images
train --model.positions=rotary --attention=fnet ~ rotary: expected
train --model.short_conv=-1 ~ --model.short_conv: expected
train --model.mlp=product_key --model.mlp_options=key=3 ~ option of mlp
train --model.mlp=product_key --model.mlp_options=keys=4,top=5 ~ top: expected at most
train --model.hybrid=hgrn, ~ --model.hybrid: expected one of
train --model.hybrid=hgnr,cosformer ~ did you mean 'hgrn'?
train --model.hybrid=os:system,cosformer ~ got 'os:system'
train --model.hybrid=luna,cosformer ~ --model.hybrid: expected mechanisms that pass no
train --model.attention_options=clip ~ expected name=value,..., got 'clip'
train --model.attention_options=eps=1,eps=2 ~ expected each option once, got 'eps' twice
train --model.attention_options=ep=1 ~ did you mean 'eps'?
train --model.attention_options=eps=1/2/3 ~ the 2 blocks, got 3
train --model.attention_options=eps={[]:1} ~ got '{[]:1}'
train --model.attention_options=eps=nan ~ got 'nan'
train --model.attention_options=eps=-1 ~ eps: expected 0 or a positive number, got -1
train --model.attention_options=implementation=foo ~ got 'foo'
train --model.attention_options=implementation=xla/pallas ~ 'pallas' on 'cpu'
train --attention=softmax --model.attention_options=block=x ~ block: expected a positive
train --attention=cosfomer ~ --attention: expected one of
train --attention=SOFTMAX ~ did you mean 'softmax'?
train --attention=:f ~ attention: expected 'package.module:function', got ':f'
train --attention=no_such:f ~ attention: expected an importable module before
train --attention=helpers:powr ~ no attribute 'powr'; did you mean 'power'?
train --attention=helpers:TRAIN ~ to be a function, got a dict
train --attention=os:system ~ attention: expected 'os:system' to take (query, key
train --attention=collections:OrderedDict ~ to take (query, key, value, ...)
train --attention=test_bad_inputs:gives_none ~ output of attention
train --attention=test_bad_inputs:gives_a_row ~ got (2, 1, 2, 32)
train --attention=test_bad_inputs:gives_complex ~ a floating dtype, got complex64
train --attention=test_bad_inputs:gives_ints ~ a floating dtype, got int32
train --attention=test_bad_inputs:Mine ~ to take (query, key, value, ...)
train --attention=helpers:values_only --model.attention_options=x=1 ~ got 'x'
train --data.min_length=5000 ~ --data.max_length: expected at least 5002
train --data.processes=0 ~ --data.processes: expected 1 to 4096
train --data.buckets=60,40 ~ --data.buckets: expected "auto"
train --data.path=nope ~ --data.path: expected a file or a folder
train --data.level=easy ~ --data.level: expected a flag of --task=listops
train --task=image --data.path=/dev/null ~ /dev/null
train --task=mqar --data.train=64/4:99999999999 ~ at most 10,000,000 examples
train --task=parity --data.parts=9999999999 ~ expected examples that fit into memory
train --task=needle --data.vocab_size=3 ~ --data.vocab_size: expected at least 4
train --task=mad-noisy-recall --data.noise=1 ~ --data.noise: expected a number in
train --task=mqar --data.train=64/40:100 ~ --data.train: expected
train --task=pathfinder --data.num_distractors=-1 ~ --data.num_distractors: expected 0
train --task=pathfinder --data.path=/no/such ~ /no/such
train --task=pathx --data.max-length=1024 ~ --data.max_length: expected a flag of
train --task=pathfinder --preset=modern --model.patch=3 ~ --model.patch: expected a
train --task=listops --model.patch=2 ~ --model.patch: expected images
train --task=lm --attention=linformer ~ --attention: expected
train --task=lm --model.is_causal=False ~ --model.is_causal: expected True
train --task=lm --data.path=nowhere ~ --data.path
train --task=lm --train.seq_devices=2 ~ --train.seq_devices
sweep --attention=softmax --suite=foo ~ --suite: expected one of
sweep ~ --attention: expected mechanisms, as in softmax,cosformer, got none
sweep --attention=softmax,,flow ~ --attention: expected different names
sweep --attention=flow --attention=linear ~ --attention: expected all names in one flag
sweep --attention=flow --suite ~ --suite: expected one of
sweep --attention=flow --lr=1e-3,0.001 ~ sweep: expected values that differ
evaluate --workdir= ~ workdir: expected a path, got ''
evaluate --workdir=x --predictions= ~ --predictions: expected a file, got ''
evaluate --workdir=nope ~ --workdir: expected a run directory, got nope
evaluate --workdir=x --spilt=test ~ did you mean '--split'?
report ~ RUNS: expected at least one folder of runs, got none
report nope ~ RUNS: expected a folder of runs, got nope
report /dev/null ~ got /dev/null, a file
report . nope ~ RUNS: expected run directories
report . --out= ~ --out: expected a path, got ''
report . --outs=x ~ did you mean '--out'?
benchmark --attention=nope ~ --attention: expected one of
benchmark --attention=softmax[ ~ --attention: expected
benchmark --attention=softmax[blok=1] ~ did you mean 'block'?
benchmark --attention=linear,linear ~ --attention: expected different
benchmark --lengths=1Q ~ --lengths: expected positive integers
benchmark --lengths=99999999999999999999 ~ --lengths: expected positive integers
benchmark --heads=0 ~ --heads: expected a positive int, got 0
benchmark --max_gb=-1 ~ --max_gb: expected a positive finite number
benchmark --dtypes=int8 ~ --dtypes: expected
benchmark --view=lra --work=forward ~ --work: expected train
benchmark --view=linformer --features=x ~ --features: expected positive integers
benchmark --out= ~ --out: expected a path, got ''
benchmark --out=/dev/null/x ~ --out: expected a file that can be written
benchmark --view=accelerator ~ --out: expected a folder
benchmark --view=accelerator --out=x --part=tims ~ did you mean 'times'
analyze pats ~ did you mean 'paths'?
analyze paths --experiment=foo ~ --experiment: expected one of
analyze paths --attention=linformer ~ --attention
analyze paths --repeats=0 ~ --repeats: expected a positive int
analyze rank-collapse --network=bert,bert ~ --network: expected different names
analyze rank-collapse --masks --workdir=x ~ --widths: expected no --workdir
analyze rank-collapse --attention=foo ~ --attention: expected one of
analyze rank-collapse --length=1 ~ --length: expected at least 2
analyze rank-collapse --weights=nope ~ --weights: expected a folder with
analyze rank-collapse --weights=a --workdir=b ~ --weights: expected nothing with
analyze rank-collapse --out= ~ --out: expected a name, got ''
analyze spectrum --layers=1 ~ --layers: expected a flag, got an unknown one; --help
analyze spectrum --seed=-5 ~ --seed: expected 0 or a positive
analyze spectrum --out=/dev/null/x ~ --out: expected a folder
analyze maps --workdir=nope ~ --workdir: expected a run directory
data prepar ~ command: expected one of prepare, describe, sample
data prepare --task=foo ~ --task: expected one of
data prepare --train.steps=3 ~ --train.steps: expected a flag
data prepare --count=3 ~ --count: expected a flag, got an unknown one
data prepare --data.num_train=0 ~ --data.num_train: expected a positive int
data prepare --data.dir=/dev/null/x ~ --data.dir: expected a folder that can be
data prepare --data.path=x --data.num_train=5 ~ --data.num_train: expected no value
data prepare --task=text --data.path=/dev/null ~ expected
data prepare --task=retrieval --data.path=/dev/null ~ expected
data sample --count=0 ~ --count: expected a positive int
data sample --out=x.png ~ --out: expected nothing for --task=listops
attention --foo ~ python -m lra_jax.attention: expected no flag
"""


def _table(text: str) -> list[Any]:
    rows = (line.split(" ~ ") for line in text.strip().splitlines())
    return [pytest.param(line, part, id=line) for line, part in rows]


@pytest.mark.parametrize(("line", "part"), _table(LINES))
def test_commands(capsys, line, part):
    refused(capsys, line, part)


@pytest.mark.parametrize(
    ("attention", "part"),
    [
        ("test_bad_inputs:one_more", "missing 1 required positional argument"),
        ("test_bad_inputs:raises", "error: RuntimeError: out of order and more"),
        ("test_bad_inputs:exits", "error: SystemExit: 0; called with query "),
        ("test_bad_inputs:makes_nothing", "error: SystemExit: 0"),
        ("test_bad_inputs:asks", "error: TracerBoolConversionError: "),
        ("test_bad_inputs:leaves_jax", "error: TracerArrayConversionError: "),
    ],
)
def test_what_an_attention_raises_is_one_line(capsys, attention, part):
    """Before the data are made."""
    with pytest.raises(SystemExit) as stop:
        train.main(["--data.dir=/dev/null/x", f"--attention={attention}"])
    out, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 1, part, "--debug shows where")
    assert out == ""


PARSED = """
train --train.steps ~ '--train.steps'
train --train.steps --seed=3 ~ '--train.steps'
train --train.steps=1e3 ~ --train.steps: invalid literal for int
train --train.adam_b1=abc ~ --train.adam-b1: could not convert string to float: 'abc'
train --train.schedule=cosin ~ invalid choice 'cosin'
train listops ~ Unrecognized options: listops
train -x ~ Unrecognized options: -x
train --seeds=1.5 ~ --seeds: invalid literal
train --distributed=TRUE ~ invalid choice 'TRUE'
train --dry-run=maybe ~ invalid choice 'maybe' for argument '--dry-run'
train --task=text --data.validation=tets ~ invalid choice 'tets'
sweep --attention=flow --lr=1e-3|3e-3 ~ --train.learning-rate: could not convert
evaluate ~ --workdir
evaluate --workdir ~ '--workdir'
evaluate --workdir=x --checkpoint=newest ~ invalid choice 'newest'
evaluate --workdir=x y ~ Unrecognized options: y
report . --out ~ --out
benchmark --heads=abc ~ --heads: invalid literal
analyze maps ~ --workdir
data sample --split=nope ~ invalid choice 'nope'
"""


@pytest.mark.parametrize(("line", "part"), _table(PARSED))
def test_what_cannot_be_parsed(capsys, line, part):
    """Errors of tyro: the text of its box alone."""
    name, *args = line.split()
    with pytest.raises(SystemExit) as stop:
        COMMANDS[name].main(args)
    out, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 2, part)
    assert out == "" and "help" not in err and not {*err} & {*"╭│─"}, err


def one_more(query, key, value, more):
    return value


def gives_none(query, key, value):
    return None


def gives_a_row(query, key, value):
    return value[:, :1]


def gives_complex(query, key, value):
    return value.astype(complex)


def gives_ints(query, key, value):
    return value.astype(int)


def raises(query, key, value):
    raise RuntimeError("out of order\nand more")


def exits(query, key, value):
    sys.exit(0)


def makes_nothing(rngs):
    sys.exit(0)


def asks(query, key, value):
    return value if query.sum() > 0 else key


def leaves_jax(query, key, value):
    return np.asarray(value)


class Mine:
    """A class whose instances would be attention."""

    def __call__(self, query, key, value):
        return value


def test_a_run_that_cannot_begin_leaves_its_directory_free(capsys, tmp_path, data_dir):
    """For the corrected command."""
    flags = helpers.flags(helpers.tiny(data_dir, tmp_path / "run"))
    for wrong, code, words in (
        ("--attention=test_bad_inputs:raises", 1, "RuntimeError: out of order"),
        ("--model.attention_options=eps=-1", 2, "eps: expected "),
        ("--data.buckets=128", 2, "--model.max_length: expected at least 128"),
        ("--data.buckets=x", 2, "buckets: expected "),
    ):
        with pytest.raises(SystemExit) as stop:
            train.main([*flags, wrong])
        _, err = capsys.readouterr()
        helpers.assert_one_error(stop.value.code, err, code, words)
        assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


NAN, INF = math.nan, math.inf
EDITS: tuple[tuple[str, Any, str], ...] = (
    ("train.steps", "abc", "--train.steps: expected an int, got 'abc'"),
    ("train.steps", -3, "--train.steps: expected a positive int, got -3"),
    ("train.steps", 10**30, "--train.steps: expected a number of at most"),
    ("train.learning_rate", math.nan, "--train.learning_rate: expected a positive"),
    ("train.learning_rate", "fast", "--train.learning_rate: expected a number"),
    ("train.schedule", "cosin", "did you mean 'cosine'"),
    ("train.decay_vectors", "yes", "--train.decay_vectors: expected True or False"),
    ("train.length_warmup", 3, "--train.length_warmup: expected text"),
    ("train.stepz", 3, "stepz"),
    ("train", None, "config: expected the fields"),
    ("model", "small", "config: expected the fields"),
    ("model.num_heads", 3, "num_heads: expected a divisor of"),
    ("model.dropout", {}, "--model.dropout: expected a number"),
    ("model.max_length", 3, "--model.max_length: expected at least 60"),
    ("model.attention_options", ["eps=1"], "--model.attention_options: expected text"),
    ("data.num_train", -1, "--data.num_train: expected a positive int"),
    ("data.level", "hard", "config: expected the fields"),
    ("data.path", 7, "--data.path: expected text or None"),
    ("task", ["listops"], "--task: expected one of"),
    ("task", "text", "config: expected the fields"),
    ("attention", "cosfomer", "did you mean 'cosformer'"),
    ("attention", 5, "--attention: expected text, got 5"),
    ("attention", "os:system", "--allow-code: expected True to import 'os:system'"),
    ("seed", "0", "--seed: expected an int"),
    ("colour", "red", "config: expected the fields"),
)


def write_run(tmp_path, text: str | bytes):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_bytes(
        text.encode() if isinstance(text, str) else text
    )
    return folder


def values() -> dict[str, Any]:
    return helpers.tiny("nowhere").to_dict() | {"data_fingerprint": "ab"}


@pytest.mark.parametrize("config", ["listops", {"task": "listops"}, None])
def test_a_run_of_no_config(config):
    with pytest.raises(ValueError, match=r"^config: expected a Config, got a"):
        train.run(config)


@pytest.mark.parametrize(("name", "value", "part"), EDITS)
def test_config_json_edited_by_hand(capsys, tmp_path, name, value, part):
    edited = values()
    place = edited
    *parts, last = name.split(".")
    for step in parts:
        place = place[step]
    place[last] = value
    write_run(tmp_path, json.dumps(edited))
    refused(capsys, "evaluate --workdir=run", part)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "3", '"text"', "{}", '{"task": "listops"}'),
        *("[" * 100_000, b"\xff\xfe", "NaN", '{"data_fingerprint": "ab"}'),
    ],
)
def test_config_json_that_is_none(capsys, tmp_path, text):
    write_run(tmp_path, text)
    refused(capsys, "evaluate --workdir=run", "config.json: expected")


def test_code_is_run_where_it_is_allowed(capsys, tmp_path, monkeypatch):
    """The flag imports the function; without it nothing of the kind happens."""
    (tmp_path / "run").mkdir()
    code = "import pathlib\npathlib.Path('run/ran').touch()\n"
    (tmp_path / "run" / "stranger.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / "run"))
    written = values() | {"attention": "stranger:attention"}
    (tmp_path / "run" / "config.json").write_text(json.dumps(written))
    for command in ("evaluate", "analyze spectrum --out=x", "analyze maps --out=x"):
        refused(capsys, f"{command} --workdir=run", "--allow-code: expected True")
    with contextlib.suppress(SystemExit):
        report.main(["run", "--out=run/report"])
    capsys.readouterr()
    assert not (tmp_path / "run" / "ran").exists()
    line = "evaluate --workdir=run --allow-code"
    refused(capsys, line, "no attribute 'attention'")
    assert (tmp_path / "run" / "ran").exists()


TEXT = st.text(
    alphabet=st.one_of(st.sampled_from("=,/:.-+ 0159ae_[](){}'\"n"), st.characters()),
    max_size=40,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(string.ascii_lowercase, max_size=6), inner, max_size=3
        )
    ),
    max_leaves=6,
)
FUZZ = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


def only_value_errors(call: Any, *args: Any, **keywords: Any) -> None:
    """A call that works, or raises in the one form."""
    try:
        call(*args, **keywords)
    except ValueError as error:
        assert ": expected " in str(error) and ", got " in str(error), error


@hypothesis.settings(FUZZ, max_examples=10)  # Each is two models.
@hypothesis.given(TEXT)
def test_texts_of_options(text):
    only_value_errors(parse_options, text)
    only_value_errors(LengthWarmup.parse, text, 100)
    lengths = np.arange(1, 50)
    only_value_errors(buckets.resolve_buckets, text, lengths, 49, 64)
    task = get_task("listops")
    for flag in ("attention_options", "mlp_options"):
        config = get_preset().replace(model={flag: text})
        only_value_errors(task.check, config)


@FUZZ
@hypothesis.given(st.lists(TEXT, max_size=3), st.sampled_from(["--seed", "--task", ""]))
def test_command_lines(args, flag):
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stderr(nothing),
        contextlib.redirect_stdout(nothing),
        contextlib.suppress(SystemExit),
    ):
        parse_config("prog", "text", [f"{flag}{arg}" for arg in args])


@FUZZ
@hypothesis.given(st.data())
def test_configs(data):
    written = Config().to_dict()
    names = st.sampled_from([*flatten(written), "train", "model", "data"])
    for name in data.draw(st.lists(names, max_size=3)):
        place = written
        *parts, last = name.split(".")
        for part in parts:
            if isinstance(place, dict):
                place = place.setdefault(part, {})
        if isinstance(place, dict):
            place[last] = data.draw(JSON)

    def read() -> None:
        config = Config.from_dict(written)
        if ":" not in config.attention:
            get_task(config.task).check(config)

    only_value_errors(read)


@FUZZ
@hypothesis.given(st.binary(max_size=80) | JSON.map(lambda x: json.dumps(x).encode()))
def test_files_of_a_run(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("run", numbered=True)
    for name, read in (
        ("config.json", workdirs.read_config),
        ("result.json", read_result),
    ):
        (folder / name).write_bytes(content)
        only_value_errors(read, folder)
