"""The rules of the protocol that can be switched off, so that the simulator can show what each is for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Switch rules of the protocol on or off. Each closes a hole; each hole has a scenario in tests/scenarios."""

    adoption_survives_retries: bool = True  # H1
    adopting_is_not_committing: bool = True  # H2
    new_term_after_sleep: bool = True  # H3
    done_is_durable: bool = True  # H4
    marks_decide: bool = True  # H5
    wait_for_everybody: bool = True  # H7
    anybody_may_lead: bool = True  # H8
    yield_to_higher_promises: bool = True  # H9
    leave_out_stuck_pairs: bool = True  # H10
    only_durable_is_told: bool = True  # H12
    promises_outlive_states: bool = True  # H13
    follow_the_linked: bool = True  # H14
    who_returns_waits: bool = True  # H17
    nobody_starves: bool = True  # H18
    roster_has_a_floor: bool = True  # H19
    salvage: bool = True  # H20
    marks_are_pruned: bool = True  # H21
    lost_leases_come_last: bool = True  # H22
    latch_voids_records: bool = True  # H23
    void_records_are_undone: bool = True  # H24


ALL = Rules()
