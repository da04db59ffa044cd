//! The cgroup of an attempt (version 2): its limits, and the end of all that is in it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ::tasks::file::Limits;

/// How long killed processes may take to be gone, before that is tried again.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// Returns the directory in which this process can make cgroups, if there is one.
#[must_use]
pub fn own_directory() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let directory = directory_in(&mounts, &own)?;
    // What is found may be read-only, as in most containers.
    let probe = directory.join(format!("subd-probe.{}", std::process::id()));
    fs::create_dir(&probe).ok()?;
    let has_kill = probe.join("cgroup.kill").exists();
    fs::remove_dir(&probe).ok()?;
    has_kill.then_some(directory)
}

fn directory_in(mounts: &str, own: &str) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        if after.split(' ').next() != Some("cgroup2") {
            return None;
        }
        let mut fields = before.split(' ').skip(3);
        let (root, mount) = (fields.next()?, fields.next()?);
        let below = Path::new(path).strip_prefix(root).ok()?;
        Some(Path::new(mount).join(below))
    })
}

/// Makes the cgroup at `path`, with `limits`. Returns the limits that are not enforced, because
/// this machine does not let subd use their controllers.
pub fn make(path: &Path, limits: &Limits) -> io::Result<Vec<&'static str>> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut unenforced = Vec::new();
    for (name, controller, file, value) in wanted(limits) {
        if let Some(parent) = path.parent() {
            // Refused where processes are in the parent itself.
            let _refused = fs::write(parent.join("cgroup.subtree_control"), controller);
        }
        if fs::OpenOptions::new().write(true).open(path.join(file)).is_err()
            || fs::write(path.join(file), value).is_err()
        {
            unenforced.push(name);
        }
    }
    Ok(unenforced)
}

/// The limits that cgroups enforce: name, controller, file and value.
fn wanted(limits: &Limits) -> Vec<(&'static str, &'static str, &'static str, String)> {
    let Limits { memory_mib, cpu_percent, processes, open_files: _ } = limits;
    let memory = memory_mib
        .map(|mib| ("memory_mib", "+memory", "memory.max", (u64::from(mib) << 20).to_string()));
    let cpu = cpu_percent.map(|percent| {
        let quota = u64::from(percent) * 1_000;
        ("cpu_percent", "+cpu", "cpu.max", format!("{quota} 100000"))
    });
    let processes = processes.map(|count| ("processes", "+pids", "pids.max", count.to_string()));
    [memory, cpu, processes].into_iter().flatten().collect()
}

/// Moves this process into the cgroup.
pub fn enter(path: &Path) -> io::Result<()> {
    fs::write(path.join("cgroup.procs"), "0")
}

/// Kills all that is in the cgroup.
pub fn kill(path: &Path) -> io::Result<()> {
    match fs::write(path.join("cgroup.kill"), "1") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Kills all that is in the cgroup, waits until it is gone, and removes the cgroup. False if
/// something does not end.
pub fn clear(path: &Path) -> io::Result<bool> {
    let deadline = Instant::now() + GONE_WITHIN;
    loop {
        kill(path)?;
        match fs::remove_dir(path) {
            Ok(()) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            // Groups that the task has made in it, or a process that the kernel does not let go.
            Err(_) => {
                let events = fs::read_to_string(path.join("cgroup.events"))?;
                return Ok(events.lines().any(|line| line == "populated 0"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_is_found_below_its_mount() {
        let hybrid = "25 24 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                      26 25 0:23 / /sys/fs/cgroup/unified rw shared:3 - cgroup2 cgroup2 rw\n";
        let table = [
            (hybrid, "4:cpu:/x\n0::/\n", Some("/sys/fs/cgroup/unified/")),
            (
                hybrid,
                "0::/system.slice/subd.service\n",
                Some("/sys/fs/cgroup/unified/system.slice/subd.service"),
            ),
            (
                "1 2 0:3 /box /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
                "0::/box/a\n",
                Some("/sys/fs/cgroup/a"),
            ),
            ("1 2 0:3 /box /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/other\n", None),
            ("25 24 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n", "0::/\n", None),
            (hybrid, "4:cpu:/x\n", None),
        ];
        for (mounts, own, directory) in table {
            assert_eq!(directory_in(mounts, own), directory.map(PathBuf::from), "{own}");
        }
    }

    #[test]
    fn limits_are_written_where_there_is_a_controller() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("run");
        fs::create_dir(&path).unwrap();
        for file in ["memory.max", "cpu.max"] {
            fs::write(path.join(file), "max").unwrap();
        }
        let limits = Limits {
            memory_mib: Some(64),
            cpu_percent: Some(150),
            processes: Some(9),
            open_files: Some(100),
        };
        assert_eq!(make(&path, &limits).unwrap(), ["processes"]);
        assert_eq!(fs::read_to_string(path.join("memory.max")).unwrap(), "67108864");
        assert_eq!(fs::read_to_string(path.join("cpu.max")).unwrap(), "150000 100000");
    }
}
