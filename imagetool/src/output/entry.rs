//! An entry of a tree as JSON and as text.
// tidy: core

use std::collections::BTreeMap;

use model::escape::{ByteText, escape};
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::{Device, Leaf, Metadata, Node, Time};
use serde::Serialize;

use crate::output::{plural, size, time};

/// An entry in JSON, without the fields that its kind does not have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EntryRecord {
    /// The word for the kind.
    pub kind: &'static str,
    /// The mode, in octal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// The owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// When the content was changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtime: Option<Time>,
    /// The length of the content, in bytes: text, because it may pass 2^53.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<String>,
    /// The content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<ObjectId>,
    /// Who computes the content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// What a symlink points to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<ByteText>,
    /// The path that a hard link is a further name of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_to: Option<TreePath>,
    /// Major and minor number of a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<(u32, u32)>,
    /// Extended attributes, names and values escaped.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub xattrs: BTreeMap<String, String>,
}

impl EntryRecord {
    /// Returns the record of `node`.
    pub fn of(node: &Node) -> Self {
        let metadata = node.metadata();
        let mut record = Self {
            kind: node.kind(),
            mode: metadata.map(|metadata| format!("{:o}", metadata.mode)),
            uid: metadata.map(|metadata| metadata.uid),
            gid: metadata.map(|metadata| metadata.gid),
            mtime: None,
            size_bytes: None,
            object: None,
            source: None,
            target: None,
            link_to: None,
            device: None,
            xattrs: metadata.map(attributes).unwrap_or_default(),
        };
        match node {
            Node::Directory(_) => {}
            Node::Leaf(Leaf::File(file)) => {
                record.mtime = Some(file.mtime);
                record.size_bytes = Some(file.size_bytes.to_string());
                record.object = Some(file.object.id());
            }
            Node::Leaf(Leaf::Computed(computed)) => record.source = Some(computed.source.clone()),
            Node::Leaf(Leaf::Symlink(symlink)) => record.target = Some(symlink.target.clone()),
            Node::Leaf(Leaf::HardLink(first)) => record.link_to = Some(first.clone()),
            Node::Leaf(Leaf::Special(special)) => {
                record.mtime = Some(special.mtime);
                record.device = match special.device {
                    Device::Block { major, minor } | Device::Character { major, minor } => {
                        Some((major, minor))
                    }
                    Device::Fifo => None,
                };
            }
        }
        record
    }

    /// Returns the record as lines with a label each.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![("Kind:", self.kind.to_owned())];
        let mut push = |label, value: Option<String>| {
            lines.extend(value.map(|value| (label, value)));
        };
        push("Link to:", self.link_to.as_ref().map(TreePath::to_string));
        push("Mode:", self.mode.clone());
        push("Owner:", self.uid.zip(self.gid).map(|(uid, gid)| format!("{uid}:{gid}")));
        let bytes = self.size_bytes.as_ref().and_then(|text| text.parse().ok());
        push("Size:", bytes.map(exact_size));
        push("Modified:", self.mtime.map(time));
        push("Object:", self.object.map(|object| object.to_string()));
        push("Computed:", self.source.as_ref().map(|source| format!("by {source}")));
        push("Target:", self.target.as_ref().map(ByteText::to_string));
        push("Device:", self.device.map(|(major, minor)| format!("{major},{minor}")));
        for (name, value) in &self.xattrs {
            push("Attribute:", Some(format!("{name}={value}")));
        }
        lines
    }
}

fn attributes(metadata: &Metadata) -> BTreeMap<String, String> {
    metadata.xattrs.iter().map(|(name, value)| (escape(name), escape(value))).collect()
}

/// Returns a length for people, exactly: `1.3 kB (1,250 bytes)`.
fn exact_size(bytes: u64) -> String {
    if bytes < 1_000 { size(bytes) } else { format!("{} ({})", size(bytes), plural(bytes, "byte")) }
}

/// Returns what a line of a list says of an entry beside its path: `file, 12 B`.
pub fn short_text(node: &Node) -> String {
    match node {
        Node::Leaf(Leaf::File(file)) => format!("file, {}", size(file.size_bytes)),
        Node::Leaf(Leaf::Computed(computed)) => format!("computed by {}", computed.source),
        Node::Leaf(Leaf::Symlink(symlink)) => format!("symlink to {}", symlink.target),
        Node::Leaf(Leaf::HardLink(first)) => format!("hard link to {first}"),
        node => node.kind().to_owned(),
    }
}
