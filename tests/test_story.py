"""What is told of a simulation: counted in full, and compared fairly with what was only computed."""

from diloco.simulation.timeline import Flow, flows


def samples(*counts: tuple[float, int, int]) -> list[dict]:
    return [{"time": at, "sent": sent, "received": received} for at, sent, received in counts]


def test_what_a_restarted_process_sent_before_its_first_sample_is_counted():
    seen = flows(samples((0, 0, 0), (1, 1000, 2000), (9, 10, 20), (10, 510, 1020)))
    assert seen == [Flow(0, 1, 1000, 2000), Flow(1, 9, 10, 20), Flow(9, 10, 500, 1000)]
    assert sum(flow.sent for flow in seen) == 1000 + 510


def test_a_restart_shows_in_either_counter():
    assert flows(samples((0, 100, 5000), (9, 300, 40))) == [Flow(0, 9, 300, 40)]
