//! Makes one record of the records that several sources have for a machine.
// tidy: core

use model::mdb::{Machine, Machines};

use super::hosts::HostFilter;

/// The machines of all sources that `filter` takes; of what sources contradict each other in, the
/// later one is right.
#[must_use]
pub fn merge<'a>(sources: impl IntoIterator<Item = &'a Machines>, filter: &HostFilter) -> Machines {
    let mut merged = Machines::new();
    for machine in sources.into_iter().flat_map(Machines::values) {
        if !filter.takes(&machine.hostname) {
            continue;
        }
        match merged.get_mut(&machine.hostname) {
            Some(known) => overlay(known, machine),
            None => {
                merged.insert(machine.hostname.clone(), machine.clone());
            }
        }
    }
    merged
}

/// Puts what `later` says over `known`. A field that says nothing takes nothing away, and no
/// source can release a machine that another one holds back: of the two mistakes, an update that
/// waits is the smaller one.
fn overlay(known: &mut Machine, later: &Machine) {
    // No field can be forgotten here.
    let Machine {
        hostname: _,
        ip_address,
        subd_port,
        required_image,
        planned_image,
        disable_updates,
        owner_groups,
        owner_users,
        location,
        tags,
    } = later;
    known.ip_address = ip_address.or(known.ip_address);
    known.subd_port = subd_port.or(known.subd_port);
    known.disable_updates |= disable_updates;
    for (text, later) in [
        (&mut known.required_image, required_image),
        (&mut known.planned_image, planned_image),
        (&mut known.location, location),
    ] {
        if !later.is_empty() {
            text.clone_from(later);
        }
    }
    for (list, later) in
        [(&mut known.owner_groups, owner_groups), (&mut known.owner_users, owner_users)]
    {
        if !later.is_empty() {
            list.clone_from(later);
        }
    }
    known.tags.extend(tags.iter().map(|(key, value)| (key.clone(), value.clone())));
}

#[cfg(test)]
mod tests {
    use model::mdb::parse;

    use super::*;

    #[track_caller]
    fn check(sources: &[&str], filter: &HostFilter, expected: &str) {
        let sources: Vec<Machines> = sources.iter().map(|text| parse(text).unwrap()).collect();
        assert_eq!(merge(&sources, filter), parse(expected).unwrap());
    }

    #[test]
    fn later_fields_win_and_empty_ones_say_nothing() {
        let all = HostFilter::default();
        let first = r#"[{"Hostname": "a", "RequiredImage": "x/1", "IpAddress": "10.0.0.1",
            "SubdPort": 7, "OwnerGroups": ["g", "h"], "Location": "nyc",
            "Tags": {"r": "1", "s": "2"}}]"#;
        check(&[], &all, "[]");
        check(&[first, "[]", r#"[{"Hostname": "a"}]"#], &all, first);
        check(&[r#"[{"Hostname": "a"}]"#, first], &all, first);
        let second = r#"[{"Hostname": "a", "RequiredImage": "x/2", "PlannedImage": "x/3",
            "IpAddress": "::1", "SubdPort": 8, "OwnerGroups": ["i"], "OwnerUsers": ["u"],
            "Location": "ams", "Tags": {"s": "3", "t": ""}}, {"Hostname": "b"}]"#;
        let both = r#"[{"Hostname": "a", "RequiredImage": "x/2", "PlannedImage": "x/3",
            "IpAddress": "::1", "SubdPort": 8, "OwnerGroups": ["i"], "OwnerUsers": ["u"],
            "Location": "ams", "Tags": {"r": "1", "s": "3", "t": ""}}, {"Hostname": "b"}]"#;
        check(&[first, second], &all, both);
    }

    #[test]
    fn any_source_can_hold_a_machine_back() {
        let yes = r#"[{"Hostname": "a", "DisableUpdates": true}]"#;
        let no = r#"[{"Hostname": "a"}]"#;
        for sources in [[yes, no], [no, yes], [yes, yes]] {
            check(&sources, &HostFilter::default(), yes);
        }
    }

    #[test]
    fn the_result_is_filtered() {
        let filter = HostFilter::new(Some("web.*"), Some("web9")).unwrap();
        let machines = r#"[{"Hostname": "web1"}, {"Hostname": "db1"}, {"Hostname": "web9"}]"#;
        check(&[machines], &filter, r#"[{"Hostname": "web1"}]"#);
    }
}
