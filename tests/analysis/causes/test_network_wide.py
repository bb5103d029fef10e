from __future__ import annotations

import numpy as np

from rankscope.analysis.causes.network_degradation import find_common_slowness
from tests.support.analysis.link_builders import group, pair, profile

HOSTS = {rank: f"host {rank // 4}" for rank in range(16)}
GROUPS = [group(k, k + 4, k + 8, k + 12) for k in range(4)]


def test_all_links_slower_in_some_steps_are_a_slow_network() -> None:
    slow = [10.0, 10.1, 9.9, 10.0, 13.0, 13.1, 12.9, 13.0, 10.0, 10.1]

    found = find_common_slowness(profile(dict.fromkeys(GROUPS, slow)), HOSTS)

    assert found is not None
    phase, links = found
    assert (phase.first, phase.last) == (4, 7)
    assert links.all()


def test_a_network_slow_in_nearly_all_steps_is_told_from_its_onset_on() -> None:
    slow = [10.0, 10.1, *[13.0, 13.1, 12.9] * 6]

    found = find_common_slowness(profile(dict.fromkeys(GROUPS, slow)), HOSTS)

    assert found is not None
    assert (found[0].first, found[0].last) == (2, 19)


def test_links_that_differ_more_within_a_step_than_steps_do_prove_no_slow_network() -> None:
    # A healthy run of a simulator whose transfers vary by 20 %: five links, 14 steps, in tenths of
    # their median. By luck the medians of steps 4 to 13 lie within 3 % of each other and those of
    # 0 to 3 are 8 to 16 % above. The links of one step differ by 14 %, so a median of five is
    # sure to 1.25 x 14 % / sqrt 5 = 8 %.
    tenths = np.array(
        [
            [12.09, 9.44, 12.16, 10.03, 11.7, 9.05, 9.49, 12.09, 9.74, 13.7, 10.84, 9.97, 9.75, 8],
            [11.61, 12.37, 10.55, 9.83, 9.52, 9.56, 7.96, 9.39, 9.87, 10.67, 10.13, 10.46, 9.68,
             11.31],
            [8.21, 10.83, 9.71, 10.99, 11.1, 11.28, 9.71, 9.78, 5.89, 8.58, 13.38, 7.16, 13.66,
             10.22],
            [12.12, 9.16, 11.15, 12.58, 9.12, 9.06, 8.62, 12.91, 10.07, 9.93, 9.02, 10.14, 8.7,
             10.47],
            [9.91, 11.17, 11.54, 12.47, 9.86, 9.71, 10.58, 8.75, 11.12, 8.29, 8.43, 9.41, 10.29,
             10.09],
        ]
    )  # fmt: skip
    links = [*GROUPS, group(*range(16))]

    assert find_common_slowness(profile(dict(zip(links, tenths, strict=True))), HOSTS) is None


def test_links_inside_a_host_take_no_part_where_others_lie_between_hosts() -> None:
    inside = [pair(4 * host, 4 * host + 1) for host in range(4)]
    slow = [10.0, 10.1, 9.9, 10.0, 13.0, 13.1, 12.9, 13.0, 10.0, 10.1]
    usual = [10.0, 10.1, 9.9, 10.0] * 2 + [10.0, 10.1]

    found = find_common_slowness(
        profile({**dict.fromkeys(inside, usual), **dict.fromkeys(GROUPS, slow)}), HOSTS
    )

    assert found is not None
    assert found[1].tolist() == [False] * 4 + [True] * 4


def test_a_network_that_flaps_in_single_steps_is_slow_in_these_where_counters_may_speak() -> None:
    # GIVEN single slow steps of eight: four of the seven changes are theirs, and pass for noise
    flapping = [10.0, 10.1, 9.9, 10.0, 28.0, 10.1, 28.0, 9.9]
    links = profile(dict.fromkeys(GROUPS, flapping))

    # WHEN few steps count, because the hosts' counters are asked for them
    found = find_common_slowness(links, HOSTS, least_steps=1)

    # THEN they are told; and by themselves they prove nothing
    assert found is not None
    assert (found[0].first, found[0].last) == (4, 6)
    assert found[1].all()
    assert find_common_slowness(links, HOSTS) is None


def test_steps_that_vary_by_a_fifth_are_no_flapping_network() -> None:
    # Lower half: 0, 1, 1, 2 below the median of 10, so sigma is 1.5 and more with its error.
    usual = [10.0, 9.0, 11.0, 8.0, 12.0, 9.0, 11.0, 12.0]

    assert find_common_slowness(profile(dict.fromkeys(GROUPS, usual)), HOSTS, least_steps=1) is None
