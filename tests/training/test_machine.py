"""What a result names besides its settings."""

import subprocess

from lra_jax.training import machine


def test_a_commit_is_that_of_the_package(tmp_path, monkeypatch) -> None:
    """Not that of a project in whose environment the package is installed."""

    def git(*command: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", "-C", tmp_path, *names, *command],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    package = tmp_path / ".venv" / "lra_jax" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=theirs")
    monkeypatch.setattr(machine.lra_jax, "__file__", str(package))
    assert machine.commit() is None
    git("add", "--force", str(package))
    git("commit", "--quiet", "--message=ours")
    assert machine.commit() == git("rev-parse", "HEAD")
    (tmp_path / "README.md").write_text("A file beside the package.")
    git("add", "README.md")
    assert machine.commit() == git("rev-parse", "HEAD")
    package.write_text("CHANGED = True")
    assert machine.commit() == git("rev-parse", "HEAD") + "-dirty"
