"""What import-linter (`make lint`) cannot tell of the tree's shape."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_no_top_level_folder_is_a_package() -> None:
    """With an __init__.py in it, `import server` would find the folder."""
    assert not [
        name for name in ("proto", "server", "export", "clients", "tests") if (ROOT / name / "__init__.py").exists()
    ]
