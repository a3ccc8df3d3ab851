"""fedvl verify, pack and leaderboard on the command line."""

import json

from helpers.forging import compared_with, edited, forged_right, summarised_again


def test_a_leaderboard_has_verified_packs_and_lists_the_others(call, tmp_path):
    folder = compared_with(tmp_path / "c", "--methods", "linear", "--seeds", "2", "--no-references")
    assert call("pack", "c", "--out", "good.zip").exit_code == 0
    assert "exists already" in str(call("pack", "c", "--out", "good.zip").exception)
    edited(sorted((folder / "runs").iterdir())[0] / "result.json", forged_right)
    summarised_again(folder)
    assert call("pack", "c", "--out", "forged").exit_code == 0
    done = call("leaderboard", "good.zip", "forged", "absent.zip", "--quiet")
    assert done.exit_code == 0
    assert "Rejected: forged: result.json has " in done.stdout
    assert "Rejected: absent.zip: absent.zip does not exist" in done.stdout
    table = json.loads((tmp_path / "leaderboard" / "leaderboard.json").read_text())
    assert [(one["row"], one["pack"], one["checked"]) for one in table["entries"]] == [("linear", "good.zip", True)]
    assert call("leaderboard", "absent.zip", "--quiet").exit_code == 1
    told = call("verify", "c", "--quiet")
    assert told.exit_code == 1
    assert "result.json has accuracy " in told.stdout
    assert told.stdout.endswith("Executed again: 1 same bits, 0 within rounding, 1 different.\nVerdict: different.\n")
    sampled = call("verify", "good.zip", "--sample", "1", "--quiet")
    assert "The features and labels of cifar10-mini are those of this package.\n" in sampled.stdout
    assert "0 different; 1 runs were not executed.\nVerdict: same bits." in sampled.stdout
    assert "does not exist" in str(call("verify", "nowhere").exception)
    assert "There is no run in" in str(call("verify", str(tmp_path)).exception)
