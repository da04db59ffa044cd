//! How much memory this process can still take.

use fs_err::read_to_string;

/// Returns how many bytes this process can take without other programs, or the limit of its
/// control group, in the way; `None` if that is not known.
pub fn available_memory() -> Option<u64> {
    let machine = field(&read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let own = read_to_string("/proc/self/status").ok();
    let own = own.and_then(|status| field(&status, "VmRSS:")).unwrap_or_default();
    let limit = read_to_string("/proc/self/cgroup").ok().and_then(|groups| group_limit(&groups));
    Some(limit.map_or(machine, |limit| machine.min(limit.saturating_sub(own))))
}

/// Returns a number of kB in a text of the kernel, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes * 1024)
}

/// Returns the lowest limit of the control group in `groups`, of version 2. At the lower of the two
/// limits the process becomes slow, at the other it is killed.
fn group_limit(groups: &str) -> Option<u64> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let limits = ["memory.high", "memory.max"].map(|name| {
        let text = read_to_string(format!("/sys/fs/cgroup{group}/{name}")).ok()?;
        text.trim().parse::<u64>().ok()
    });
    limits.into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_what_is_available() {
        let text = "MemTotal:  100 kB\nMemAvailable:    3 kB\nHugePages_Total:       0\n";
        assert_eq!(field(text, "MemAvailable:"), Some(3_072));
        assert_eq!(field(text, "HugePages_Total:"), None);
        assert_eq!(field("", "VmRSS:"), None);
        assert!(available_memory().unwrap() > 0);
    }
}
