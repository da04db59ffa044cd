//! Archives that nobody should have made are refused whole, naming the entry.

use proptest::prelude::*;
use tar::EntryType;

use crate::tars::{Member, archive, pax_records, read, shown};

fn refused(members: Vec<Member>) -> String {
    let bytes = archive([Member::file(b"good", b"content")].into_iter().chain(members));
    let text = shown(&bytes);
    text.strip_prefix("error: ").unwrap_or_else(|| panic!("accepted:\n{text}")).trim().to_owned()
}

#[test]
fn names_and_links_that_lead_outside_are_refused() {
    let below_symlink = || vec![Member::symlink(b"a", b"/etc"), Member::file(b"a/passwd", b"x")];
    let longest = vec![b'n'; 100];
    let table: Vec<(Vec<Member>, &str)> = vec![
        (
            vec![Member::file(b"../evil", b"")],
            "the entry `../evil` is refused: its name contains `..`",
        ),
        (
            vec![Member::file(b"a/../../evil", b"")],
            "the entry `a/../../evil` is refused: its name contains `..`",
        ),
        (
            vec![Member::file(b"/etc/passwd", b"")],
            "the entry `/etc/passwd` is refused: its name is absolute",
        ),
        (
            vec![Member::pax(&[("path", b"/etc/passwd")]), Member::file(b"x", b"")],
            "the entry `/etc/passwd` is refused: its name is absolute",
        ),
        (vec![Member::file(b"", b"")], "the entry `` is refused: it has no name"),
        (vec![Member::pax(&[("path", &[b'p'; 256])]), Member::file(b"x", b"")], "the entry `pppp"),
        (
            vec![Member::pax(&[("path", b"a\0b")]), Member::file(b"x", b"")],
            "the entry `a\\x00b` is refused: invalid name: path `/a\\x00b` has the bad \
             component `a\\x00b`: it holds a zero byte",
        ),
        (below_symlink(), "the entry `a/passwd` is refused: it is below /a, which is a symlink"),
        (
            below_symlink().into_iter().rev().collect(),
            "the entry `a/passwd` is refused: it is below /a, which is a symlink",
        ),
        (
            vec![Member::file(b"good/x", b"")],
            "the entry `good/x` is refused: it is below /good, which is a file",
        ),
        (
            vec![Member::file(b"./good", b"")],
            "the entry `./good` is refused: it is in the archive twice",
        ),
        (
            vec![Member::symlink(b"./", b"/etc")],
            "the entry `./` is refused: it is the root of the tree but not a directory",
        ),
        (
            vec![Member::hard_link(b"link", b"nowhere")],
            "the entry `link` is refused: it is a hard link to /nowhere, which is not a regular \
             file",
        ),
        (
            vec![Member::hard_link(b"link", b"link")],
            "the entry `link` is refused: it is a hard link to /link, which is not a regular file",
        ),
        (
            vec![Member::hard_link(b"a", b"b"), Member::hard_link(b"b", b"a")],
            "the entry `a` is refused: it is a hard link to /a, which is not a regular file",
        ),
        (
            vec![Member::directory(b"d"), Member::hard_link(b"link", b"d")],
            "the entry `link` is refused: it is a hard link to /d, which is not a regular file",
        ),
        (
            vec![Member::hard_link(b"link", b"../../etc/passwd")],
            "the entry `link` is refused: it is a hard link to `../../etc/passwd`: its name \
             contains `..`",
        ),
        (
            vec![Member::hard_link(b"link", b"/etc/passwd")],
            "the entry `link` is refused: it is a hard link to `/etc/passwd`: its name is absolute",
        ),
        (
            vec![Member::symlink(&longest, b"")],
            "is refused: it is a symlink with a target of 0 bytes: 1 to 4,095 are allowed",
        ),
    ];
    for (members, want) in table {
        let got = refused(members);
        assert!(got.contains(want), "{got}\nwanted: {want}");
    }
}

#[test]
fn headers_that_lie_are_refused() {
    let field = |change: fn(&mut tar::Header)| vec![Member::file(b"x", b"").change(change)];
    let global = |key: &str| {
        let records = pax_records(&[(key, b"1")]);
        vec![Member::new(EntryType::XGlobalHeader, b"g").content(&records)]
    };
    let acl = |text: &'static [u8]| {
        vec![Member::pax(&[("SCHILY.acl.access", text)]), Member::file(b"x", b"")]
    };
    let table: Vec<(Vec<Member>, &str)> = vec![
        (
            field(|header| header.as_old_mut().uid = *b"-1\0\0\0\0\0\0"),
            "the entry `x` is refused: its uid is not a number or out of range",
        ),
        (
            field(|header| header.set_uid(u64::from(u32::MAX))),
            "the entry `x` is refused: its uid is not a number or out of range",
        ),
        (
            field(|header| {
                header.set_entry_type(EntryType::Char);
                header.set_device_major(0).unwrap();
                header.set_device_minor(1 << 20).unwrap();
            }),
            "the entry `x` is refused: its device is not a number or out of range",
        ),
        (
            field(|header| {
                header.set_entry_type(EntryType::Block);
                header.set_device_major(1 << 12).unwrap();
                header.set_device_minor(0).unwrap();
            }),
            "the entry `x` is refused: its device is not a number or out of range",
        ),
        (
            vec![Member::pax(&[("LIBARCHIVE.xattr.user.k", b"d\xffgA")]), Member::file(b"x", b"")],
            "the entry `x` is refused: invalid pax header: the pax record `LIBARCHIVE.xattr` \
             has the invalid value `d\\xffgA`",
        ),
        (
            (0..5)
                .map(|_| {
                    let records = pax_records(&[("comment", &[b'c'; 1 << 20])]);
                    Member::new(EntryType::XGlobalHeader, b"g").content(&records)
                })
                .collect(),
            "the entry `g` is refused: its pax header has 4194",
        ),
        (
            field(|header| header.as_old_mut().mode = *b"rw-r--r-"),
            "the entry `x` is refused: its mode is not a number or out of range",
        ),
        (
            field(|header| header.as_old_mut().size = [0xff; 12]),
            "the entry `x` is refused: its size is not a number or out of range",
        ),
        (
            field(|header| header.set_entry_type(EntryType::new(b'D'))),
            "the entry `x` is refused: its type `D` is unknown",
        ),
        (
            vec![Member::directory(b"d").content(b"content")],
            "the entry `d` is refused: it claims 7 bytes of content, which its kind cannot have",
        ),
        (
            vec![Member::hard_link(b"link", b"good").content(b"content")],
            "the entry `link` is refused: it claims 7 bytes of content, which its kind cannot have",
        ),
        (
            vec![
                Member::new(EntryType::XHeader, b"pax").content(b"7 a=b"),
                Member::file(b"x", b""),
            ],
            "the entry `pax` is refused: invalid pax header: invalid pax record at byte 0 of its \
             header",
        ),
        (
            vec![Member::pax(&[("mtime", b"soon")]), Member::file(b"x", b"")],
            "the entry `x` is refused: invalid pax header: the pax record `mtime` has the \
             invalid value `soon`",
        ),
        (
            vec![Member::pax(&[]), Member::pax(&[]), Member::file(b"x", b"")],
            "the entry `pax` is refused: it has two headers of one kind",
        ),
        (global("path"), "the entry `g` is refused: it sets `path` for all entries that follow"),
        (global("size"), "the entry `g` is refused: it sets `size` for all entries that follow"),
        (
            acl(b"user::rw-"),
            "the entry `x` is refused: invalid access control list: the access control list \
             is incomplete or repeats an entry",
        ),
        (
            acl(b"user:nobody-has-this-name:rw-,user::rw-,group::r--,mask::rw-,other::r--"),
            "names an account unknown here",
        ),
        (
            vec![
                Member::pax(&[("SCHILY.xattr.system.posix_acl_access", b"junk")]),
                Member::file(b"x", b""),
            ],
            "the entry `x` is refused: invalid access control list: the access control list \
             is not in the kernel's form",
        ),
        (
            vec![
                Member::pax(&[
                    ("GNU.sparse.major", b"1"),
                    ("GNU.sparse.minor", b"0"),
                    ("GNU.sparse.realsize", b"9000000000000000000"),
                ]),
                Member::file(b"x", &[&b"0\n"[..], &[0; 510]].concat()),
            ],
            "the entry `x` is refused: invalid map of the sparse file: it is larger than 1 TiB",
        ),
        (
            vec![
                Member::pax(&[
                    ("GNU.sparse.major", b"1"),
                    ("GNU.sparse.minor", b"0"),
                    ("GNU.sparse.realsize", b"10"),
                ]),
                Member::file(b"x", &[b'9'; 512]),
            ],
            "the entry `x` is refused: invalid map of the sparse file: its map is not a list \
             of numbers",
        ),
        (
            vec![
                Member::pax(&[("GNU.sparse.size", b"10"), ("GNU.sparse.map", b"0,5,5")]),
                Member::file(b"x", b""),
            ],
            "the entry `x` is refused: invalid map of the sparse file: its map has an odd \
             number of numbers",
        ),
    ];
    for (members, want) in table {
        let got = refused(members);
        assert!(got.contains(want), "{got}\nwanted: {want}");
    }
}

#[test]
fn sizes_that_no_machine_has_end_the_archive_and_take_no_memory() {
    for size in [b"777777777777".to_owned(), *b"\x80\0\0\0\x10\0\0\0\0\0\0\0"] {
        for kind in [EntryType::Regular, EntryType::XHeader, EntryType::GNULongName] {
            let member = Member::new(kind, b"x").change(|header| header.as_old_mut().size = size);
            let got = shown(&archive([member]));
            assert!(
                got.starts_with("error: the archive is truncated")
                    || got.contains("is refused: its"),
                "{got}"
            );
        }
    }
}

#[test]
fn what_is_no_archive_is_said_to_be_none() {
    let mut appended = archive([Member::file(b"a", b"1")]);
    appended.extend(archive([Member::file(b"b", b"2")]));
    let mut damaged = archive([Member::file(b"a", b"1"), Member::file(b"b", b"2")]);
    damaged[1_024] ^= 1;
    let mut dangling = archive([Member::file(b"a", b"1"), Member::pax(&[("path", b"b")])]);
    dangling.truncate(dangling.len() - 512);
    let no_tar =
        "error: this is not a tar archive, nor one compressed with gzip, zstd, xz or bzip2\n";
    let table: [(&[u8], &str); 7] = [
        (b"", "error: the archive is empty\n"),
        (b"PK\x03\x04 is a zip file", no_tar),
        (&[b'x'; 600], no_tar),
        (&appended, "error: more data follows the end of the archive, at byte 4096\n"),
        (&damaged, "error: the archive is damaged: no header at byte 1024, after a\n"),
        (&dangling, "error: the archive is truncated: it ends at byte 2560, after a\n"),
        (
            b"\x1f\x8bgarbage of some length that is no gzip",
            "error: cannot read the archive after byte 0: ",
        ),
    ];
    for (bytes, want) in table {
        let got = shown(bytes);
        assert!(got.starts_with(want), "{got}wanted: {want}");
    }
}

/// A small archive with a bit of everything.
pub fn sample() -> Vec<u8> {
    archive([
        Member::directory(b"./"),
        Member::directory(b"./etc/"),
        Member::file(b"./etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"),
        Member::pax(&[("mtime", b"1700000000.25"), ("SCHILY.xattr.user.k", b"v\n\0")]),
        Member::file(b"./etc/large", &[7; 3_000]),
        Member::hard_link(b"./etc/again", b"./etc/large"),
        Member::symlink(b"./bin", b"usr/bin"),
        Member::new(EntryType::Fifo, b"./pipe"),
    ])
}

pub fn compressed(bytes: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    use std::io::{Read as _, Write as _};
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(bytes).unwrap();
    let mut xz = Vec::new();
    liblzma::read::XzEncoder::new(bytes, 6).read_to_end(&mut xz).unwrap();
    let mut bzip2 = Vec::new();
    bzip2::read::BzEncoder::new(bytes, bzip2::Compression::default())
        .read_to_end(&mut bzip2)
        .unwrap();
    vec![
        ("none", bytes.to_owned()),
        ("gzip", gzip.finish().unwrap()),
        ("zstd", zstd::stream::encode_all(bytes, 3).unwrap()),
        ("xz", xz),
        ("bzip2", bzip2),
    ]
}

#[test]
fn an_archive_that_was_cut_anywhere_is_refused_or_whole() {
    let sample = sample();
    let whole = read(&sample).unwrap();
    for (name, bytes) in compressed(&sample) {
        let mut whole_at = Vec::new();
        for length in (0..bytes.len()).step_by(if name == "none" { 61 } else { 1 }) {
            if let Ok(tree) = read(&bytes[..length]) {
                assert_eq!(tree, whole, "{name} cut to {length} bytes");
                whole_at.push(length);
            }
        }
        // Only a part of the zeros at the end of a plain archive may be missing.
        let least = if name == "none" { bytes.len() - 1_024 } else { bytes.len() };
        assert!(whole_at.iter().all(|length| *length > least), "{name}: {whole_at:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn changed_bytes_never_make_it_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        which in 0_usize..5,
    ) {
        let (_, mut bytes) = compressed(&sample()).remove(which);
        for (index, byte) in changes {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        let _ = read(&bytes);
    }
}
