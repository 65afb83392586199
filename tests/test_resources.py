"""What this process may use: what is told by control groups of made trees, of both versions."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from ipslimit.checks import NoRoom, require_room
from ipslimit.resources import (
    available_memory,
    processor_name,
    processor_says,
    processors,
    total_memory,
)

GIB = 2**30
V2 = "30 24 0:27 {shown} {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 24 0:28 {shown} {mount} rw shared:9 - cgroup cgroup rw,{controllers}\n"
UNLIMITED = 9223372036854771712  # what version 1 says


@pytest.fixture(autouse=True)
def large_machine(monkeypatch):
    """64 processors and 256 GiB, of which 200 are free."""
    memory = SimpleNamespace(total=256 * GIB, available=200 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    process = SimpleNamespace(cpu_affinity=lambda: list(range(64)))
    monkeypatch.setattr(psutil, "Process", lambda: process)


def tree(folder, groups, mounts, files):
    """A machine's files: the groups of the process, what is mounted, and files of groups."""
    for name, content in {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
        **files,
    }.items():
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return folder


def version_2(folder, files, group="/", shown="/", mount="/sys/fs/cgroup"):
    files = {f"{mount}/{name}": content for name, content in files.items()}
    return tree(folder, f"0::{group}\n", V2.format(shown=shown, mount=mount), files)


def test_a_machine_without_groups_is_used_as_a_whole(tmp_path):
    assert processors(tmp_path) == 64
    assert (available_memory(tmp_path), total_memory(tmp_path)) == (200 * GIB, 256 * GIB)


def test_a_group_that_limits_nothing_changes_nothing(tmp_path):
    files = {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "12345\n"}
    root = version_2(tmp_path, files)
    assert processors(root) == 64 and total_memory(root) == 256 * GIB


@pytest.mark.parametrize(("quota", "count"), [(50_000, 1), (200_000, 2), (250_000, 3)])
def test_a_quota_of_version_2_counts_in_whole_processors(tmp_path, quota, count):
    assert processors(version_2(tmp_path, {"cpu.max": f"{quota} 100000\n"})) == count


def test_every_group_around_the_process_counts(tmp_path):
    """As Slurm nests them: the job has 16 GiB and 8 processors, its step less of either."""
    stat = f"anon 1\ninactive_file {GIB}\nactive_file 7\n"
    files = {
        "job/memory.max": 16 * GIB,
        "job/memory.current": 15 * GIB,
        "job/memory.stat": stat,
        "job/cpu.max": "800000 100000",
        "job/step/memory.max": 12 * GIB,
        "job/step/memory.high": 10 * GIB,
        "job/step/memory.current": 3 * GIB,
        "job/step/cpu.max": "max 100000",
        "another/memory.max": 1,
        "another/memory.current": 1,
        "another/cpu.max": "1 100000",
    }
    root = version_2(tmp_path, files, group="/job/step")
    assert processors(root) == 8
    assert total_memory(root) == 10 * GIB
    assert available_memory(root) == 2 * GIB  # of the job, whose cached file would be given back


def test_a_group_that_is_full_leaves_nothing(tmp_path):
    root = version_2(tmp_path, {"memory.max": GIB, "memory.current": GIB + 4096})
    assert available_memory(root) == 0


def version_1(folder, group, shown):
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": 150_000,
        "cpu,cpuacct/job/cpu.cfs_period_us": 50_000,
        "cpu,cpuacct/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/cpu.cfs_period_us": 100_000,
        "memory/job/memory.limit_in_bytes": 4 * GIB,
        "memory/job/memory.usage_in_bytes": 2 * GIB,
        "memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
        "memory/memory.limit_in_bytes": UNLIMITED,
        "memory/memory.usage_in_bytes": 100 * GIB,
    }
    names = ("cpu,cpuacct", "memory", "pids")
    lines = [(name, f"/sys/fs/cgroup/{name}") for name in names]
    mounts = [V1.format(shown=shown, mount=mount, controllers=name) for name, mount in lines]
    groups = "".join(f"{i}:{name}:{group}\n" for i, name in enumerate(names, 1))
    files = {f"/sys/fs/cgroup/{name}": content for name, content in files.items()}
    # as a machine with both versions has it: the second without any controller
    mounts = [*mounts, V2.format(shown="/", mount="/sys/fs/cgroup/unified")]
    return tree(folder, f"{groups}9:name=systemd:/\n0::/\n", "".join(mounts), files)


def test_version_1_is_read_where_each_controller_is_mounted(tmp_path):
    root = version_1(tmp_path, "/job", "/")
    assert processors(root) == 3
    assert total_memory(root) == 4 * GIB and available_memory(root) == 3 * GIB


def test_a_container_that_sees_only_its_own_group_finds_it(tmp_path):
    """Its path is told from a root that is not mounted."""
    files = {"cpu.max": "400000 100000", "memory.max": GIB, "memory.current": 0}
    for name, shown in (("same", "/docker/17"), ("other", "/")):
        group = "/docker/17" if name == "same" else "/../../17"
        root = version_2(tmp_path / name, files, group=group, shown=shown)
        assert processors(root) == 4 and total_memory(root) == GIB


def test_a_mount_whose_path_has_spaces_is_found(tmp_path):
    root = version_2(tmp_path, {}, mount="/my\\040groups")
    (tmp_path / "my groups").mkdir()
    (tmp_path / "my groups" / "cpu.max").write_text("100000 100000")
    assert processors(root) == 1


@pytest.mark.parametrize("error", [AttributeError, psutil.AccessDenied])
def test_where_no_affinity_is_told_all_processors_count(tmp_path, monkeypatch, error):
    def refused():
        raise error

    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_affinity=refused))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 10)
    assert processors(tmp_path) == 10


def test_sizes_beyond_all_memory_are_refused(monkeypatch):
    monkeypatch.setattr("ipslimit.devices.total_memory", lambda: 256 * GIB)
    require_room("depth", 255 * GIB // 8, torch.float64)
    with pytest.raises(NoRoom, match=r"depth must fit into the memory .*, 256 GiB; got .* 300"):
        require_room("depth", 300 * GIB // 8, torch.float64)


def test_the_processor_is_named_as_the_system_names_it(tmp_path):
    assert processor_says("vendor_id", tmp_path) == "" and processor_name(tmp_path)
    (tmp_path / "proc").mkdir()
    one = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) @ 2.80GHz\n"
    (tmp_path / "proc/cpuinfo").write_text(f"{one}\n{one}")
    assert processor_says("vendor_id", tmp_path) == "GenuineIntel"
    assert processor_name(tmp_path) == "Intel(R) Xeon(R) @ 2.80GHz"
