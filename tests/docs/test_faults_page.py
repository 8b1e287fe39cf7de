"""Each fault that the page on isolation lists is proved by tests, and those tests exist."""

from __future__ import annotations

import re

from tests.conftest import ROOT
from tests.docs.pages import TEXTS
from tests.orchestrator.execution.test_faults import FAULTS

FAULT = "orchestrator/execution/test_faults.py::test_a_fault_has_its_expected_row_and_leaves_other_cells_untouched"
RAY = "orchestrator/scheduling/test_ray_scheduler.py"
# By the beginning of a row of the table "What can go wrong": the tests of that row, in tests/.
# Rename a test here too when you rename it.
PROOFS: dict[str, list[str]] = {
    "CUDA runs out of memory": [
        f"{FAULT}[out of memory]",
        "test_gpu.py::test_an_oom_has_its_evidence_in_each_phase",
    ],
    "the host runs out of memory": [
        f"{FAULT}[host memory]",
        "orchestrator/execution/test_measurement.py"
        "::test_the_kernels_killer_takes_the_cell_and_its_row_says_so",
    ],
    "SIGKILL": [
        f"{FAULT}[a sudden end]",
        f"{RAY}::test_each_fault_is_a_row_and_does_not_affect_other_cells",
    ],
    "an exception": [f"{FAULT}[an exception]"],
    "an illegal address": ["test_gpu.py::test_a_cuda_error_that_sticks_fails_its_cell_alone"],
    "a model changes the tf32 setting": [
        "orchestrator/execution/test_measurement.py::test_an_fp32_that_became_tf32_is_no_result"
    ],
    "a model changes another setting": [
        "tasks/harness/test_stage_checks.py::test_a_setting_that_the_cell_changes_is_recorded"
    ],
    "an optimizer runs": [
        "tasks/harness/test_stage_checks.py::test_an_optimizer_that_ran_has_changed_a_parameter"
    ],
    "a model waits": ["tasks/process/test_minder.py::test_a_rank_has_no_child_to_wait_for"],
    "a process needs minutes": [
        "orchestrator/execution/test_measurement.py"
        "::test_start_up_time_does_not_count_towards_the_time_limit"
    ],
    "a hang": [f"{FAULT}[a hang]"],
    "a cell leaves processes behind": [f"{FAULT}[a process left behind]"],
    "a gigabyte of output": [f"{FAULT}[a flood of output]"],
    "the system clock jumps": [f"{FAULT}[a clock that jumps]"],
    "a GPU fails": [
        "orchestrator/scheduling/test_gpu_lost.py"
        "::test_the_other_gpus_measure_the_cells_of_a_failed_one",
        "orchestrator/scheduling/test_gpu_lost.py"
        "::test_a_run_without_a_working_gpu_stops_and_the_next_run_continues",
    ],
    "the disk is full": [
        "orchestrator/store/test_run.py::test_a_full_disk_loses_no_finished_cell",
        "orchestrator/store/test_run.py::test_a_read_only_folder_is_reported",
        "orchestrator/sweep/test_pipeline.py::test_a_removed_results_folder_ends_the_sweep",
    ],
    "a damaged or lost file of a batch": [
        "orchestrator/store/test_stored_rows.py::test_a_damaged_file_is_built_again_from_journals",
        "orchestrator/store/test_stored_rows.py"
        "::test_a_damaged_line_of_the_log_is_stored_again_from_the_journal",
        "orchestrator/store/test_stored_rows.py::test_a_lost_list_is_written_again",
    ],
    "a damaged Parquet part": [
        "orchestrator/sweep/test_pipeline.py"
        "::test_a_torn_row_is_reported_and_its_cell_measured_again"
    ],
    "the driver is killed with -9": [
        f"{RAY}::test_a_killed_driver_loses_and_repeats_no_finished_cell",
        "orchestrator/store/test_run.py"
        "::test_a_kill_while_an_outcome_is_stored_leaves_it_complete_or_absent",
    ],
    "Ctrl-C": [
        f"{RAY}::test_ctrl_c_ends_the_cells_and_keeps_the_finished_ones",
        f"{RAY}::test_a_time_limit_has_its_exit_code_and_the_next_run_continues",
    ],
    "`--fresh` or `--retry` is stopped": [
        "orchestrator/planning/test_marks.py"
        "::test_an_interrupted_command_given_again_continues_where_it_stopped",
        "orchestrator/planning/test_marks.py"
        "::test_an_earlier_success_is_shown_until_a_new_one_exists",
    ],
    "the fork server dies": [
        "orchestrator/execution/test_fork_client.py"
        "::test_a_server_that_dies_under_its_children_costs_nothing"
    ],
    "the minder of a cell dies": [
        f"{FAULT}[a minder that goes away]",
        "orchestrator/execution/test_fork_client.py"
        "::test_a_minder_that_dies_costs_its_attempt_alone",
        "orchestrator/execution/test_fork_client.py"
        "::test_a_minder_that_is_stopped_is_killed_after_its_limits",
    ],
    "a Ray worker or a node goes away": [
        f"{RAY}::test_a_killed_worker_and_a_lost_node_cost_one_cell_each",
        f"{RAY}::test_a_node_that_freezes_costs_one_cell_and_not_its_time_limit",
    ],
    "Ray on this machine dies, hangs": [
        "orchestrator/scheduling/test_ray_reaper.py"
        "::test_no_process_lives_five_seconds_after_its_sweep_was_killed",
        f"{RAY}::test_a_private_ray_that_begins_no_cell_ends_the_sweep",
    ],
    "one of several hosts": [
        "orchestrator/scheduling/test_host_broken.py"
        "::test_other_hosts_measure_the_rest_and_the_next_run_repeats_the_lost_cells",
        "orchestrator/scheduling/test_host_broken.py"
        "::test_a_run_without_a_working_host_stops_and_the_next_run_continues",
    ],
    "no node is left": [
        "orchestrator/scheduling/test_cluster.py"
        "::test_an_attempt_that_no_node_can_run_waits_five_minutes"
    ],
    "whatever reads the output": [
        "orchestrator/cli/test_main.py::test_a_sweep_continues_when_nobody_reads_its_output"
    ],
    "a second driver": [
        f"{RAY}::test_a_second_driver_is_refused",
        "orchestrator/store/test_mirror.py::test_a_second_driver_is_refused_unless_it_takes_over",
    ],
    "a bucket fails": [
        "orchestrator/store/test_mirror.py::test_uploads_that_fail_are_repeated",
        "orchestrator/store/test_mirror.py"
        "::test_results_that_cannot_be_uploaded_are_reported_and_uploaded_by_the_next_run",
    ],
    "a config that is wrong": [
        "orchestrator/config/test_schema.py"
        "::test_a_mutated_config_is_refused_in_one_line_or_expands",
        "orchestrator/config/test_schema.py"
        "::test_a_grid_of_a_thousand_million_cells_is_refused_before_it_is_multiplied_out",
    ],
}


def test_every_fault_of_the_page_has_a_test() -> None:
    page = TEXTS["docs/explanation/isolation-and-faults.md"]
    table = page.partition("| what goes wrong |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (?!---)(.+?) \|", table, re.MULTILINE)
    assert len(rows) == len(PROOFS)
    for row, beginning in zip(rows, PROOFS, strict=True):
        assert row.startswith(beginning)


def test_every_injected_fault_is_in_the_page() -> None:
    named = {test for tests in PROOFS.values() for test in tests}
    assert {f"{FAULT}[{fault}]" for fault in FAULTS} <= named


def test_the_tests_that_prove_a_row_exist() -> None:
    missing = []
    for test in {test for tests in PROOFS.values() for test in tests}:
        file, _, name = test.partition("::")
        name, _, parameter = name.partition("[")
        exists = f"def {name}(" in (ROOT / "tests" / file).read_text()
        if not exists or (parameter and parameter.removesuffix("]") not in FAULTS):
            missing.append(test)
    assert not missing
