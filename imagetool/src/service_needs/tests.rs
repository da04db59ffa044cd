//! What is told for small trees, units, tmpfiles.d and lists of users.

use model::object::Algorithm;
use model::tree::Tree;
use model::tree::text::from_text;

use super::*;

const UNIT: &str = "/usr/lib/systemd/system/redis.service";
const TMPFILES: &str = "/usr/lib/tmpfiles.d/mail.conf";

fn tree(text: &str) -> Tree {
    let empty = format!("0.000000000 0 {}", Algorithm::Blake3.digest(b""));
    from_text(Algorithm::Blake3, &text.replace("EMPTY", &empty)).unwrap()
}

/// The needs of files with these contents.
fn needs(files: &[(&str, Meaning, &str)]) -> Needs {
    let object = Algorithm::Blake3.digest(b"");
    let file = |(path, meaning, _): &(&str, Meaning, &str)| NeedsFile {
        path: path.parse().unwrap(),
        meaning: *meaning,
        object,
        size_bytes: 0,
    };
    let known: Vec<NeedsFile> = files.iter().map(file).collect();
    Needs::read(known.iter().zip(files.iter().map(|(_, _, content)| content.as_bytes())))
}

/// The lines that are advised for a tree, and what the warning says.
fn data(tree: &Tree, needs: &Needs, filter: &[&str]) -> (Vec<String>, Vec<String>) {
    let mut cache = DirectoryCache::default();
    cache.insert_tree(tree);
    let survey = Survey::of(&mut cache, tree.digest());
    let filter = Filter::new(filter).unwrap();
    let find = |path: &TreePath| Found::at(&mut cache, tree.digest(), path);
    let Warnings { warnings, filter_lines } =
        lost_data(&survey, needs, &filter, find).warnings(&LostData::default());
    (warnings, filter_lines)
}

fn none() -> (Vec<String>, Vec<String>) {
    (Vec::new(), Vec::new())
}

const SYSTEM: &str = "\
d 755 0:0 /etc
f 644 0:0 EMPTY /etc/passwd
d 755 0:0 /srv
d 755 33:33 /srv/www
d 755 33:33 /srv/www/deep
d 755 0:0 /usr
d 755 0:0 /usr/lib
d 755 0:0 /usr/lib/systemd
d 755 0:0 /usr/lib/systemd/system
f 644 0:0 EMPTY /usr/lib/systemd/system/redis.service
d 755 0:0 /usr/lib/systemd/system/redis.service.d
f 644 0:0 EMPTY /usr/lib/systemd/system/redis.service.d/more.conf
d 755 0:0 /usr/lib/tmpfiles.d
f 644 0:0 EMPTY /usr/lib/tmpfiles.d/mail.conf
d 755 0:0 /var
d 755 0:0 /var/lib
d 755 0:0 /var/lib/empty
d 755 0:0 /var/lib/full
d 755 0:0 /var/lib/full/below
d 750 101:101 /var/lib/redis
d 755 0:0 /var/spool
d 755 0:0 /var/spool/cron
d 1730 0:102 /var/spool/cron/crontabs
";

#[test]
fn directories_that_services_own_are_told_until_their_content_is_kept() {
    let tree = tree(SYSTEM);
    let needs = needs(&[
        ("/etc/passwd", Meaning::Users, "root:x:0:0::/:/bin/sh\nredis:x:101:101::/:/bin/sh\n"),
        ("/etc/group", Meaning::Groups, "crontab:x:102:\n"),
    ]);
    let text = "services keep data in directories whose content the filter does not keep, so that \
        it would be removed from machines: /srv/www (user 33), /var/lib/redis (user redis), \
        /var/spool/cron/crontabs (group crontab)";
    let lines = ["/srv/www/.*", "/var/lib/redis/.*", "/var/spool/cron/crontabs/.*"];
    let all = data(&tree, &needs, &[]);
    assert_eq!(all, (vec![text.to_owned()], lines.map(str::to_owned).to_vec()));
    assert_eq!(data(&tree, &needs, &lines), none());
    // A line about something in a directory shows that its maker has decided.
    let some = ["/srv/www/deep$", "/var/lib/redis/dump.rdb$", "/var/spool/.*"];
    assert_eq!(data(&tree, &needs, &some), none());
}

#[test]
fn directories_that_units_and_tmpfiles_name_are_told_as_well() {
    let filter = ["/srv/.*", "/var/spool/.*", "/var/lib/redis$"];
    let tree = tree(SYSTEM);
    let lines = |unit: &str, tmpfiles: &str| {
        let files = [(UNIT, Meaning::Unit, unit), (TMPFILES, Meaning::Tmpfiles, tmpfiles)];
        data(&tree, &needs(&files), &filter).1
    };
    #[rustfmt::skip]
    let table: [(&str, &str, &[&str]); 12] = [
        ("[Service]\nStateDirectory=new+er redis", "", &[r"/var/lib/new\+er$"]),
        ("[Service]\nStateDirectory = full/below:link", "", &["/var/lib/full/below/.*"]),
        ("StateDirectory=one\nDynamicUser=yes", "", &["/var/lib/one$", "/var/lib/private/one$"]),
        ("StateDirectory=a a/b a-c", "", &["/var/lib/a$", "/var/lib/a-c$"]),
        ("StateDirectory=at-%i ../up /root", "", &[]),
        ("#StateDirectory=no\nLogsDirectory=x\nReadWritePaths=/var/lib/full", "", &[]),
        ("", "d /var/lib/mail 0755 root root -", &["/var/lib/mail$"]),
        ("", "d! /var/lib/empty/", &["/var/lib/empty/.*"]),
        // What has entries of the image is no place for data, unless it looks like one.
        ("", "d /var/lib/full 0755 root root -", &[]),
        ("", "D /var/lib/full 0755 mail :root -", &["/var/lib/full/.*"]),
        ("", "v /var/lib/full - - - 14d", &["/var/lib/full/.*"]),
        ("", "d /var/lib\nd /run/x - mail\n# d /var/lib/x\nf /var/lib/y\nd /var/lib/%m\nd", &[]),
    ];
    for (unit, tmpfiles, expected) in table {
        assert_eq!(lines(unit, tmpfiles), expected, "{unit} {tmpfiles}");
    }
    let path: TreePath = "/etc/systemd/system/redis.service.d/more.conf".parse().unwrap();
    let mut named = Vec::new();
    named::in_unit(&path, "StateDirectory=a", &mut named);
    let path: TreePath = "/etc/systemd/system/\x1b[2J.service".parse().unwrap();
    named::in_unit(&path, "StateDirectory=a", &mut named);
    let [of_change, hostile] = named.as_slice() else { panic!("{named:?}") };
    assert_eq!(of_change.by, "redis.service");
    assert!(!hostile.by.contains('\x1b'), "{hostile:?}");
}

#[test]
fn only_what_says_something_of_services_is_read() {
    let tree = tree(SYSTEM);
    let mut cache = DirectoryCache::default();
    cache.insert_tree(&tree);
    let survey = Survey::of(&mut cache, tree.digest());
    let paths: Vec<String> = survey.files.iter().map(|file| file.path.to_string()).collect();
    let more = "/usr/lib/systemd/system/redis.service.d/more.conf";
    assert_eq!(paths, ["/etc/passwd", UNIT, more, TMPFILES]);
}

#[test]
fn a_hostile_image_is_looked_at_in_part_and_that_is_told() {
    let first = Algorithm::Blake3.digest(b"1");
    let mut text =
        "d 755 0:0 /lib\nd 755 0:0 /lib/systemd\nd 755 0:0 /lib/systemd/system\n".to_owned();
    for number in 10..40 {
        text += &format!("f 644 0:0 0.000000000 1048576 {first} /lib/systemd/system/{number}\n");
    }
    let large = tree(&text);
    let mut cache = DirectoryCache::default();
    cache.insert_tree(&large);
    let survey = Survey::of(&mut cache, large.digest());
    assert_eq!(survey.files.len(), 16);
    let told = |survey: &Survey, needs: &Needs| {
        partial_warning(survey, needs).warnings.iter().any(|text| text.starts_with("not all units"))
    };
    assert!(told(&survey, &Needs::default()));
    let (unit, tmpfiles) = ("StateDirectory=a\n".repeat(20_000), "d /srv/a\n".repeat(20_000));
    let files = [(UNIT, Meaning::Unit, &*unit), (TMPFILES, Meaning::Tmpfiles, &*tmpfiles)];
    let many = needs(&files);
    assert_eq!(many.named.len(), DIRECTORIES_MAX + 1);
    assert!(told(&Survey::default(), &many));
    assert!(!told(&Survey::default(), &needs(&[])));
}

#[test]
fn directories_that_are_left_out_are_told_if_services_need_them() {
    let needs = needs(&[
        (UNIT, Meaning::Unit, "StateDirectory=redis\nReadWritePaths=-/var/lib/may /var/log/redis"),
        (TMPFILES, Meaning::Tmpfiles, "d /var/spool/mail 0755 root root -"),
    ]);
    let dropped = |path: &str, gid| DroppedDirectory { path: path.parse().unwrap(), uid: 0, gid };
    let all = [
        dropped("/home/x", 1_000),
        dropped("/var/cache/man/de", 6),
        dropped("/var/lib/may", 0),
        dropped("/var/lib/redis", 101),
        dropped("/var/log/apt", 0),
        dropped("/var/log/nginx", 4),
        dropped("/var/log/redis", 0),
        dropped("/var/spool/mail", 0),
    ];
    let text = "the filter leaves out directories that services need, so that a machine without \
        them does not get them: /var/log/nginx (group 4), /var/log/redis (redis.service), \
        /var/spool/mail (/usr/lib/tmpfiles.d/mail.conf); keep only what is in them, by lines such \
        as /var/log/nginx/.*, /var/log/redis/.*, /var/spool/mail/.*";
    // Who owns a directory can make what was in it.
    let owner =
        |path: &TreePath| Some((0, if path.to_string() == "/var/cache/man" { 6 } else { 0 }));
    let found = dropped_warnings(&all, &needs, owner);
    assert_eq!((found.warnings, found.filter_lines), (vec![text.to_owned()], Vec::new()));
    assert_eq!(dropped_warnings(&all[..5], &needs, owner), Warnings::default());
}

#[test]
fn other_numbers_of_users_and_groups_are_told_if_machines_keep_files() {
    let of = |users: &str, groups: &str| Accounts { users: ids(users), groups: ids(groups) };
    let before = of("root:x:0:0::/:\nredis:x:101:101::\ngone:x:9:9::\n", "redis:x:101:\nadm:x:4:");
    let after = of("root:x:0:0::/:\nredis:x:102:101::\nnew:x:101:1::\n", "redis:x:101:\nadm:x:5:");
    let keep = Filter::new(["/var/lib/redis/.*"]).unwrap();
    let name = ImageName::new("base/1").unwrap();
    let text = "if machines go from base/1 to this, files that they keep have the old numbers of \
        users and groups: user redis: 101 to 102, group adm: 4 to 5; make the root with the \
        numbers of base/1";
    let found = renumbered_warning(&after, &before, &name, &keep);
    assert_eq!(found.warnings, [text]);
    assert_eq!(renumbered_warning(&before, &before, &name, &keep), Warnings::default());
    let nothing = Filter::new::<&str>([]).unwrap();
    assert_eq!(renumbered_warning(&after, &before, &name, &nothing), Warnings::default());
}
