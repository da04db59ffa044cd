//! Archives of every kind give the tree that they hold.

use expect_test::{Expect, expect, expect_file};
use tar::EntryType;

use crate::hostile::{compressed, sample};
use crate::tars::{Member, archive, read, shown};

#[track_caller]
fn check(members: impl IntoIterator<Item = Member>, expect: Expect) {
    expect.assert_eq(&shown(&archive(members)));
}

#[test]
fn all_kinds_of_entries_are_read() {
    expect![[r#"
        d 755 0:0 /
        l 0:0 /bin -> usr/bin
        d 755 0:0 /etc
        f 644 0:0 1700000000.250000000 3000 9e890443 /etc/again user.k=v\n\x00
        h /etc/large -> /etc/again
        f 644 0:0 1700000000.000000000 30 b381ae57 /etc/passwd
        p 644 0:0 1700000000.000000000 /pipe
    "#]]
    .assert_eq(&shown(&sample()));
}

#[test]
fn the_compression_is_known_by_the_first_bytes() {
    let sample = sample();
    let want = read(&sample).unwrap();
    for (name, bytes) in compressed(&sample) {
        assert_eq!(read(&bytes).unwrap(), want, "{name}");
    }
    // Streams that were written one after the other are one stream.
    let (head, tail) = sample.split_at(1_000);
    for (index, (name, mut bytes)) in compressed(head).into_iter().enumerate() {
        bytes.extend(compressed(tail).remove(index).1);
        assert_eq!(read(&bytes).unwrap(), want, "{name}");
    }
}

#[test]
fn hard_links_may_come_in_any_order() {
    let orders: [&[usize]; 4] = [&[0, 1, 2], &[2, 1, 0], &[1, 2, 0], &[1, 0, 2]];
    for order in orders {
        let members = order.iter().map(|index| match index {
            0 => Member::file(b"m", b"content"),
            1 => Member::hard_link(b"a", b"m"),
            _ => Member::hard_link(b"z", b"a"),
        });
        check(
            members,
            expect![[r#"
                d 755 0:0 /
                f 644 0:0 1700000000.000000000 7 3fba5250 /a
                h /m -> /a
                h /z -> /a
            "#]],
        );
    }
}

#[test]
fn names_may_be_long_odd_or_in_old_forms() {
    let long = "d/".repeat(60) + &"n".repeat(200);
    let gnu = |kind, name: &[u8]| {
        let header = Member::new(kind, b"././@LongLink").content(name);
        header.change(|header| {
            let mut gnu = tar::Header::new_gnu();
            gnu.set_entry_type(header.entry_type());
            gnu.set_size(header.entry_size().unwrap());
            gnu.set_mode(0);
            *header = gnu;
        })
    };
    let with_zero = [long.as_bytes(), b"\0"].concat();
    let by_gnu = archive([
        gnu(EntryType::GNULongName, &with_zero),
        gnu(EntryType::GNULongLink, &with_zero),
        Member::symlink(b"cut", b"cut"),
    ]);
    let by_pax = archive([
        Member::pax(&[("path", long.as_bytes()), ("linkpath", long.as_bytes())]),
        Member::symlink(b"cut", b"cut"),
    ]);
    assert_eq!(read(&by_gnu).unwrap(), read(&by_pax).unwrap());
    assert_eq!(read(&by_gnu).unwrap().root().totals().entries, 61);
    let prefixed = Member::file(b"name", b"").change(|header| {
        let prefix = &mut header.as_ustar_mut().unwrap().prefix;
        prefix[..6].copy_from_slice(b"prefix");
    });
    check(
        [
            prefixed,
            Member::file(b"odd\xff\nname", b""),
            Member::file(b"back\\slash", b""),
            // A slash at the end makes a directory of what has no type.
            Member::file(b"old/", b""),
            // A name with a newline in a pax record, and one that pretends to be a record.
            Member::pax(&[("comment", b"x\n13 path=evil\n"), ("path", b"new\nline")]),
            Member::file(b"x", b""),
        ],
        expect![[r#"
            d 755 0:0 /
            f 644 0:0 1700000000.000000000 0 af1349b9 /back\\slash
            f 644 0:0 1700000000.000000000 0 af1349b9 /new\nline
            f 644 0:0 1700000000.000000000 0 af1349b9 /odd\xff\nname
            d 644 0:0 /old
            d 755 0:0 /prefix
            f 644 0:0 1700000000.000000000 0 af1349b9 /prefix/name
        "#]],
    );
}

#[test]
fn devices_owners_times_and_attributes_are_kept() {
    let device = |kind, name: &[u8], major, minor| {
        Member::new(kind, name).change(|header| {
            header.set_device_major(major).unwrap();
            header.set_device_minor(minor).unwrap();
        })
    };
    let capability = b"\x01\0\0\x02\0\x20\0\0\n\0\0\0\0\0\0\0\0\0\0\0";
    let members = [
        device(EntryType::Char, b"null", 1, 3),
        device(EntryType::Block, b"disk", 8, 17),
        Member::pax(&[
            ("uid", b"70000000"),
            ("gid", b"7"),
            ("mtime", b"-1.5"),
            ("SCHILY.xattr.security.capability", capability),
            ("SCHILY.xattr.user.a%3Db", b""),
            ("SCHILY.xattr.trusted.secret", b"not managed"),
            ("RHT.security.selinux", b"system_u:object_r:bin_t:s0"),
        ]),
        Member::file(b"all", b"x").change(|header| header.set_mode(0o4755)),
        Member::pax(&[(
            "SCHILY.acl.access",
            b"user::rw-,user:7:rwx,group::r--,mask::r-x,other::---",
        )]),
        Member::file(b"list", b"").change(|header| header.set_mode(0o4600)),
        Member::pax(&[("SCHILY.acl.access", b"user::rw-,group::r--,other::r--")]),
        Member::file(b"minimal", b""),
    ];
    expect_file!["expected/attributes.txt"].assert_eq(&shown(&archive(members)));
}

#[test]
fn attributes_in_the_form_of_libarchive_are_kept() {
    let members = [
        Member::pax(&[
            ("LIBARCHIVE.xattr.user.a", b"dgAK"),
            ("LIBARCHIVE.xattr.user.gr%C3%BCn%3D", b"dg"),
            // Both forms of one attribute are what libarchive writes.
            ("LIBARCHIVE.xattr.user.z", b"dg=="),
            ("SCHILY.xattr.user.z", b"v"),
            ("LIBARCHIVE.xattr.trusted.secret", b"dg"),
        ]),
        Member::file(b"x", b""),
    ];
    check(
        members,
        expect![[r#"
            d 755 0:0 /
            f 644 0:0 1700000000.000000000 0 af1349b9 /x user.a=v\x00\n user.grün\x3d=v user.z=v
        "#]],
    );
}

#[test]
fn a_long_chain_of_hard_links_is_walked_once() {
    let name = |number: u32| format!("{number:06}").into_bytes();
    let links = (1..50_000).map(|number| Member::hard_link(&name(number), &name(number - 1)));
    let tree = read(&archive([Member::file(&name(0), b"x")].into_iter().chain(links))).unwrap();
    assert_eq!(tree.root().totals().hard_links, 49_999);
}

#[test]
fn holes_are_zeros_in_all_four_forms() {
    let mut content = vec![0; 3_000];
    content[1_024..1_029].copy_from_slice(b"hello");
    let want = read(&archive([Member::file(b"x", &content)])).unwrap();
    let old = Member::new(EntryType::GNUSparse, b"x").content(b"hello").change(|header| {
        let mut gnu = tar::Header::new_gnu();
        let fields = gnu.as_gnu_mut().unwrap();
        fields.sparse[0].set_offset(1_024);
        fields.sparse[0].set_length(5);
        fields.sparse[1].set_offset(3_000);
        fields.sparse[1].set_length(0);
        fields.set_real_size(3_000);
        gnu.as_old_mut().name = header.as_old().name;
        gnu.set_entry_type(EntryType::GNUSparse);
        gnu.set_size(5);
        gnu.set_mode(0o644);
        gnu.set_uid(0);
        gnu.set_gid(0);
        gnu.set_mtime(1_700_000_000);
        *header = gnu;
    });
    let first = Member::pax(&[
        ("GNU.sparse.size", b"3000"),
        ("GNU.sparse.numblocks", b"2"),
        ("GNU.sparse.offset", b"1024"),
        ("GNU.sparse.numbytes", b"5"),
        ("GNU.sparse.offset", b"3000"),
        ("GNU.sparse.numbytes", b"0"),
    ]);
    let second = Member::pax(&[
        ("GNU.sparse.size", b"3000"),
        ("GNU.sparse.numblocks", b"2"),
        ("GNU.sparse.map", b"1024,5,3000,0"),
        ("GNU.sparse.name", b"x"),
    ]);
    let third = Member::pax(&[
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"x"),
        ("GNU.sparse.realsize", b"3000"),
    ]);
    let mut map = b"2\n1024\n5\n3000\n0\n".to_vec();
    map.resize(512, 0);
    map.extend_from_slice(b"hello");
    let forms = [
        archive([old]),
        archive([first, Member::file(b"x", b"hello")]),
        archive([second, Member::file(b"GNUSparseFile.7/x", b"hello")]),
        archive([third, Member::file(b"GNUSparseFile.7/x", &map)]),
    ];
    for (index, form) in forms.iter().enumerate() {
        assert_eq!(shown(form), shown(&archive([Member::file(b"x", &content)])), "{index}");
        assert_eq!(read(form).unwrap(), want, "{index}");
    }
}

#[test]
fn what_subd_keeps_for_itself_is_refused() {
    let error = read(&archive([Member::directory(b"etc"), Member::file(b".subd/objects", b"")]));
    assert_eq!(
        model::display::error_chain(&error.unwrap_err()),
        "the entry `.subd/objects` is refused: /.subd belongs to subd alone: leave it out of the \
         archive"
    );
    check(
        [Member::file(b".subdue", b"")],
        expect![[r#"
            d 755 0:0 /
            f 644 0:0 1700000000.000000000 0 af1349b9 /.subdue
        "#]],
    );
}
