"""Seeded disasters of the protocol, none of which may violate anything."""

from collections.abc import Iterable

import pytest

from diloco.simulate.virtual.campaign import Campaign

CAMPAIGN = Campaign()


def commits_of(seeds: Iterable[int], campaign: Campaign = CAMPAIGN) -> int:
    """All of them together; none violates anything."""
    commits = 0
    for outcome in campaign.run(seeds):
        if outcome.violation:
            pytest.fail(campaign.describe(outcome.seed))
        commits += outcome.commits
    return commits
