//! Short texts: paths, names, escapes, addresses, ranges, times.

use model::escape;
use model::image::ImageName;
use model::object::ObjectId;
use model::path::TreePath;
use rpc::client::Peer;
use rpc::packing;
use rpc::server::ByteRange;

/// Reads the input as each kind of text.
pub fn texts(bytes: &[u8]) {
    path(bytes);
    for escaped in [escape::escape(bytes), escape::escape_word(bytes)] {
        assert!(!escaped.contains(char::is_control), "{escaped:?}");
        assert_eq!(escape::unescape(&escaped).as_deref(), Ok(bytes));
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(bytes) = escape::unescape(text) {
        assert_eq!(escape::unescape(&escape::escape(&bytes)), Ok(bytes));
    }
    if let Ok(name) = ImageName::new(text) {
        assert_eq!(ImageName::new(name.as_str()).as_ref(), Ok(&name));
        assert!(name.components().all(|part| !["", ".", ".."].contains(&part)));
        assert!(!name.as_str().contains(char::is_control));
    }
    if let Ok(id) = text.parse::<ObjectId>() {
        assert_eq!(id.to_string(), text);
    }
    if let Ok(peer) = Peer::parse(text, 6_969) {
        assert_eq!(Peer::parse(&peer.authority(), 1).as_ref(), Ok(&peer));
    }
    range(text);
    let _answer = packing::is_accepted(text);
    let _length = model::time_parse::duration(text);
    let plain = model::display::safe_text(text, 80);
    assert!(!plain.contains(char::is_control), "{plain:?}");
}

fn path(bytes: &[u8]) {
    let Ok(path) = TreePath::new(bytes) else { return };
    assert_eq!(path.as_bytes(), bytes);
    assert_eq!(escape::unescape(&path.to_string()).as_deref(), Ok(bytes));
    assert!(path.components().all(|name| model::path::fault_of_name(name).is_none()));
    if let Some(parent) = path.parent() {
        assert_eq!(parent.join(path.name()).as_ref(), Ok(&path));
        assert!(path.starts_with(&parent) && parent < path);
    }
}

fn range(text: &str) {
    let Some(range) = ByteRange::parse(text) else { return };
    for total_bytes in [0, 1, 1_000, u64::MAX] {
        if let Some(part) = range.of(total_bytes) {
            assert!(part.start < part.end && part.end <= total_bytes, "{part:?}");
        }
    }
}
