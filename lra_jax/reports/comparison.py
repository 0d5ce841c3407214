"""Names groups of runs by what tells them apart."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lra_jax.configs import get_preset
from lra_jax.reports.runs import Group
from lra_jax.tasks import get_task

_OF_REPORTING = ("train.log_every", "train.eval_batch_size")


def title(group: Group) -> str:
    """The mechanism of a group and its preset."""
    return f"{group.config.mixers}, {group.config.preset}"


def full_title(group: Group, groups: Sequence[Group]) -> str:
    """The same with any settings that tell the group from others."""
    settings = differing_settings(group, groups)
    return f"{title(group)} ({settings})" if settings else title(group)


def differing_settings(group: Group, groups: Sequence[Group]) -> str:
    """Distinguishes a group from others of its task, mechanism and preset by the flags
    that differ, as in ``learning_rate=0.001``; empty if it is the only one."""
    task = group.config.task
    same = [
        one for one in groups if (one.config.task, title(one)) == (task, title(group))
    ]
    settings = [{**one.config.identity(), "seed": 0} for one in same]
    mine = {**group.config.identity(), "seed": 0}
    one_data = len({one.fingerprint for one in same}) == 1
    if one_data:  # The same files, wherever they lie.
        settings = [one | {"data.path": mine.get("data.path")} for one in settings]
    words = _differences(mine, settings, lambda name: _short(name, mine))
    if not one_data:
        words.append(f"data {group.fingerprint[:6]}")
    return ", ".join([*words, *differing_code(group, same)])


def differing_code(group: Group, groups: Sequence[Group]) -> list[str]:
    """Distinguishes the version of a user's attention, if there are several, by the
    first run of it, whose folder holds its source."""
    same = [one for one in groups if one.config.attention == group.config.attention]
    first = {one.runs[0].code: one.runs[0].folder for one in reversed(same)}
    return [f"code of {first[group.runs[0].code]}"] if len(first) > 1 else []


def differing_data(group: Group, groups: Sequence[Group]) -> str:
    """Distinguishes the examples of a group from others of its task by the settings
    that differ, as in ``data.length=64``; empty if all groups have the same ones."""
    same = [one for one in groups if one.config.task == group.config.task]
    # One group for each set of examples, whatever the path from which it was read.
    settings = {one.fingerprint: _data_settings(one) for one in reversed(same)}
    mine = settings.pop(group.fingerprint)
    words = _differences(mine, settings.values())
    if mine in settings.values():
        words.append(f"data {group.fingerprint[:6]}")
    return ", ".join(words)


def differing_starts(group: Group, groups: Sequence[Group]) -> list[str]:
    """Distinguishes a group from others of its task by the data settings, as in
    ``checkpoint=RUN``, that differ and change training but not the examples."""

    def starts(one: Group) -> dict[str, Any]:
        data = one.config.data
        return {name: getattr(data, name) for name in data.start_fields}

    same = [one for one in groups if one.config.task == group.config.task]
    return _differences(starts(group), map(starts, same))


def settings_unlike_preset(group: Group, apart_from: Iterable[str]) -> list[str]:
    """The settings of model and training that are not the preset's, as NAME=value.

    Empty if there is no such preset any more. On other examples than the preset's, the
    batches and the length of the model follow the examples, and are left out.
    """
    skipped = {*apart_from, *_OF_REPORTING}
    if data_unlike_preset(group):
        skipped |= {"train.batch_size", "model.max_length"}
    every = group.config.identity()
    mine = {n: x for n, x in group.config.protocol().items() if n not in skipped}
    return _differences(mine, _preset(group), lambda name: _short(name, every))


def model_name(group: Group) -> str:
    """A mechanism, its options, and the settings that are not the preset's, except for
    those that were tuned."""
    model = group.config.model
    named = {"model.attention_options", "model.is_causal", *_tuned_names(group)}
    parts = [group.config.attention, model.attention_options]
    parts += settings_unlike_preset(group, apart_from=named)
    if not model.is_causal:
        parts.append("encoder")
    return " ".join(filter(None, parts))


def _tuned_names(group: Group) -> tuple[str, ...]:
    """The settings of which a row shows the best value by validation."""
    protocol = get_task(group.config.task).sweeps.get(group.config.preset, {})
    return tuple(dict.fromkeys(("train.learning_rate", *protocol)))


def data_unlike_preset(group: Group) -> list[str]:
    """The settings of the examples that are not the preset's, as NAME=value; empty if
    there is no such preset any more."""
    mine = _data_settings(group)
    return _differences(mine, _preset(group), lambda name: name.removeprefix("data."))


def _preset(group: Group) -> list[dict[str, Any]]:
    """The settings of a group's preset, if there still is one."""
    config = group.config
    if config.preset not in get_task(config.task).presets:
        return []
    return [get_preset(config.task, config.preset, config.attention).identity()]


def _data_settings(group: Group) -> dict[str, Any]:
    """The settings that determine which examples there are."""
    config = group.config
    batch_fields = {f"data.{name}" for name in config.data.batch_fields}
    return {
        name: value
        for name, value in config.identity().items()
        if name.startswith("data.") and name not in batch_fields
    }


def _differences(
    mine: Mapping[str, Any],
    others: Iterable[Mapping[str, Any]],
    show: Callable[[str], str] = str,
) -> list[str]:
    """The settings in which one differs from any of the others, as NAME=value."""
    others = list(others)
    return [
        f"{show(name)}={value}"
        for name, value in mine.items()
        if any(other.get(name) != value for other in others)
    ]


def _short(name: str, names: Iterable[str]) -> str:
    """The last word of a setting's name where a command line takes it for this one: no
    other setting has it, or this is the one of training."""
    end = name.rpartition(".")[2]
    alike = [other for other in names if other.rpartition(".")[2] == end]
    return end if len(alike) == 1 or name.startswith("train.") else name
