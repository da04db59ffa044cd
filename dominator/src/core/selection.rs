//! Which machines of a list are asked for.
// tidy: core

use api::dominator::{ListSubsRequest, Status, TagFilter};
use model::mdb::Machine;

use super::meaning::{HostPatterns, is_within};

/// What is asked for, ready to look at machines with.
#[derive(Clone, Debug)]
pub struct Selection {
    statuses: Vec<Status>,
    hosts: Option<HostPatterns>,
    images: Vec<String>,
    locations: Vec<String>,
    tags: Vec<TagFilter>,
}

impl Selection {
    /// Makes `request` ready.
    ///
    /// # Errors
    ///
    /// If a pattern of host names is none.
    pub fn new(request: ListSubsRequest) -> Result<Self, globset::Error> {
        let hosts = HostPatterns::new(&request.hosts)?;
        let ListSubsRequest { statuses, images, locations, tags, .. } = request;
        Ok(Self { statuses, hosts, images, locations, tags })
    }

    /// True if a machine with this status is asked for; one whose record names no image has the
    /// `default`.
    #[must_use]
    pub fn wants(&self, machine: &Machine, default: Option<&str>, status: Status) -> bool {
        let image = match (machine.required(), default) {
            (None, Some(default)) => default,
            _ => &machine.required_image,
        };
        let within = |wanted: &[String], path: &str| {
            wanted.is_empty() || wanted.iter().any(|wanted| is_within(path, wanted))
        };
        (self.statuses.is_empty() || self.statuses.contains(&status))
            && self.hosts.as_ref().is_none_or(|hosts| hosts.is_match(&machine.hostname))
            && within(&self.images, image)
            && within(&self.locations, &machine.location)
            && self.tags.iter().all(|tag| tag.is_of(machine))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_chosen_by_all_that_is_asked_for() {
        let text = r#"[
            {"Hostname": "web1", "RequiredImage": "web/7", "Location": "nyc/r1",
             "Tags": {"tier": "front"}},
            {"Hostname": "web2", "RequiredImage": "/web/8", "Location": "nyc/r2"},
            {"Hostname": "mail", "RequiredImage": "mail/1", "Location": "sfo",
             "Tags": {"tier": "back", "old": ""}},
            {"Hostname": "spare"}]"#;
        let machines = model::mdb::parse(text).unwrap();
        let chosen = |request: ListSubsRequest| -> Vec<String> {
            let selection = Selection::new(request).unwrap();
            let status = |machine: &Machine| match machine.required() {
                Some(_) => Status::Synced,
                None => Status::ImageUndefined,
            };
            let chosen = machines
                .values()
                .filter(|machine| selection.wants(machine, Some("rescue"), status(machine)));
            chosen.map(|machine| machine.hostname.clone()).collect()
        };
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let all = ListSubsRequest::default;
        let tag = |name: &str, value: Option<&str>| TagFilter {
            name: name.to_owned(),
            value: value.map(str::to_owned),
        };
        let table: [(ListSubsRequest, &[&str]); 13] = [
            (all(), &["mail", "spare", "web1", "web2"]),
            (ListSubsRequest { statuses: vec![Status::ImageUndefined], ..all() }, &["spare"]),
            (ListSubsRequest { hosts: texts(&["web*"]), ..all() }, &["web1", "web2"]),
            (
                ListSubsRequest { hosts: texts(&["web?", "mail"]), ..all() },
                &["mail", "web1", "web2"],
            ),
            (ListSubsRequest { hosts: texts(&["we"]), ..all() }, &[]),
            (ListSubsRequest { images: texts(&["web"]), ..all() }, &["web1", "web2"]),
            (ListSubsRequest { images: texts(&["/web/8"]), ..all() }, &["web2"]),
            (ListSubsRequest { images: texts(&["rescue"]), ..all() }, &["spare"]),
            (ListSubsRequest { images: texts(&["we", ""]), ..all() }, &[]),
            (
                ListSubsRequest { locations: texts(&["nyc", "sfo/"]), ..all() },
                &["mail", "web1", "web2"],
            ),
            (ListSubsRequest { tags: vec![tag("tier", None)], ..all() }, &["mail", "web1"]),
            (
                ListSubsRequest {
                    tags: vec![tag("tier", Some("back")), tag("old", None)],
                    ..all()
                },
                &["mail"],
            ),
            (
                ListSubsRequest { hosts: texts(&["web*"]), locations: texts(&["nyc/r2"]), ..all() },
                &["web2"],
            ),
        ];
        for (request, expected) in table {
            assert_eq!(chosen(request.clone()), expected, "{request:?}");
        }
        assert!(Selection::new(ListSubsRequest { hosts: texts(&["web["]), ..all() }).is_err());
    }
}
