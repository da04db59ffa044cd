//! The files that differ on each machine, so that no image brings them back.

/// A file, or files, that differ on each machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineSpecific {
    /// The path or pattern that messages show.
    pub shown: &'static str,
    /// A path that represents it.
    pub probe: &'static str,
    /// The filter line that leaves it to the machines.
    pub line: &'static str,
    /// True if an image for whole machines should leave it to them. Others have it on purpose, or
    /// their machines have none.
    pub is_expected: bool,
    /// Machines have it only if the image has this path.
    pub with: Option<&'static str>,
}

/// All that differs on each machine.
pub const MACHINE_SPECIFIC: [MachineSpecific; 14] = [
    expected("/etc/fstab", "/etc/fstab", "/etc/fstab$", None),
    expected("/etc/hostname", "/etc/hostname", "/etc/hostname$", None),
    expected("/etc/machine-id", "/etc/machine-id", "/etc/machine-id$", None),
    expected(
        "/var/lib/dbus/machine-id",
        "/var/lib/dbus/machine-id",
        "/var/lib/dbus/machine-id$",
        Some("/var/lib/dbus"),
    ),
    expected(
        "/etc/ssh/ssh_host_*",
        "/etc/ssh/ssh_host_ed25519_key",
        "/etc/ssh/ssh_host_.*",
        Some("/etc/ssh"),
    ),
    expected("/etc/dominator/tls/*", "/etc/dominator/tls/key.pem", "/etc/dominator/tls$", None),
    expected("/etc/subd/*", "/etc/subd/config.toml", "/etc/subd$", None),
    possible("/etc/adjtime", "/etc/adjtime", "/etc/adjtime$"),
    possible("/etc/crypttab", "/etc/crypttab", "/etc/crypttab$"),
    possible("/etc/netplan/*", "/etc/netplan/net.yaml", "/etc/netplan/.*"),
    possible("/etc/network/interfaces", "/etc/network/interfaces", "/etc/network/interfaces$"),
    possible(
        "/etc/network/interfaces.d/*",
        "/etc/network/interfaces.d/net",
        "/etc/network/interfaces\\.d/.*",
    ),
    possible(
        "/etc/NetworkManager/system-connections/*",
        "/etc/NetworkManager/system-connections/net",
        "/etc/NetworkManager/system-connections/.*",
    ),
    possible("/etc/ssl/private/*", "/etc/ssl/private/key.pem", "/etc/ssl/private/.*"),
];

const fn expected(
    shown: &'static str,
    probe: &'static str,
    line: &'static str,
    with: Option<&'static str>,
) -> MachineSpecific {
    MachineSpecific { shown, probe, line, is_expected: true, with }
}

const fn possible(shown: &'static str, probe: &'static str, line: &'static str) -> MachineSpecific {
    MachineSpecific { shown, probe, line, is_expected: false, with: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::Filter;

    #[test]
    fn each_line_and_the_filter_for_debian_keep_what_the_line_is_for() {
        let lines = Filter::new(MACHINE_SPECIFIC.map(|one| one.line)).unwrap();
        let debian = include_str!("../../../packaging/filter-debian");
        let debian = Filter::from_text(debian).unwrap();
        for one in MACHINE_SPECIFIC {
            let probe = one.probe.parse().unwrap();
            assert!(lines.keeps(&probe) && debian.keeps(&probe), "{}", one.shown);
        }
    }

    #[test]
    fn the_filter_for_debian_keeps_data_and_leaves_directories_of_packages_to_the_image() {
        let debian = include_str!("../../../packaging/filter-debian");
        let debian = Filter::from_text(debian).unwrap();
        #[rustfmt::skip]
        let table = [
            ("/var/spool/cron/crontabs", false), ("/var/spool/cron/crontabs/root", true),
            ("/var/spool/cron/atjobs", false), ("/var/spool/cron/atjobs/.SEQ", true),
            ("/var/spool/cups", false), ("/var/spool/cups/c1", true),
            ("/var/spool/anacron/cron.daily", true), ("/var/spool/cronic/x", true),
            ("/var/spool/rsyslog/deep/x", true), ("/var/spool/crate/x", true),
            ("/var/lib/dhcp", false), ("/var/lib/dhcp/dhclient.leases", true),
            ("/etc/netplan", false), ("/etc/network/if-up.d/x", false),
        ];
        for (path, keeps) in table {
            assert_eq!(debian.keeps(&path.parse().unwrap()), keeps, "{path}");
        }
    }
}
