//! Versions and ranges.

use expect_test::expect;
use provisioning::version::{Range, Version};

#[test]
fn a_condition_looks_at_as_many_numbers_as_it_has() {
    #[rustfmt::skip]
    let table = [
        (">=1", "1", true), (">=1", "0.9", false), (">=1", "1.0.1", true), (">=1", "15", true),
        (">1", "1.5", false), (">1", "2", true), (">1.4", "1.5", true),
        ("<=1", "1.9", true), ("<=1", "2.0", false), ("<2", "1.99", true), ("<2", "2", false),
        ("=15", "15.2", true), ("15", "15.2", true), ("15.2", "15", false), ("=15.0", "15", true),
        (">=15, <17", "16.4", true), (">=15, <17", "17", false), (" >= 15 ,<17 ", "15", true),
        ("=22.04", "22.4", true), ("<10", "9", true), (">=2", "10", true),
    ];
    for (range, version, fits) in table {
        let parsed: Range = range.parse().unwrap();
        let version: Version = version.parse().unwrap();
        assert_eq!(parsed.fits(&version), fits, "{version} {range}");
        assert_eq!(parsed.to_string().parse(), Ok(parsed), "{range}");
    }
}

#[test]
fn what_is_no_version_is_refused() {
    let versions =
        ["", "1.", ".1", "a", "1.x", "-1", "1 ", "+1", "1.2.3.4.5.6.7.8.9", "99999999999999999999"];
    let ranges = ["", ">", ">=", ">=1,", ">==1", "^1", "~1", "*", "1 2"];
    let mut said = String::new();
    for text in versions {
        said.push_str(&format!("{}\n", text.parse::<Version>().unwrap_err()));
    }
    for text in ranges {
        said.push_str(&format!("{}\n", text.parse::<Range>().unwrap_err()));
    }
    expect![[r#"
        `` is no version: expected numbers such as 15.2
        `1.` is no version: expected numbers such as 15.2
        `.1` is no version: expected numbers such as 15.2
        `a` is no version: expected numbers such as 15.2
        `1.x` is no version: expected numbers such as 15.2
        `-1` is no version: expected numbers such as 15.2
        `1 ` is no version: expected numbers such as 15.2
        `+1` is no version: expected numbers such as 15.2
        `1.2.3.4.5.6.7.8.9` is no version: expected numbers such as 15.2
        `99999999999999999999` is no version: expected numbers such as 15.2
        `` is no range of versions: expected conditions such as `>=15, <17`
        `>` is no range of versions: expected conditions such as `>=15, <17`
        `>=` is no range of versions: expected conditions such as `>=15, <17`
        `>=1,` is no range of versions: expected conditions such as `>=15, <17`
        `>==1` is no range of versions: expected conditions such as `>=15, <17`
        `^1` is no range of versions: expected conditions such as `>=15, <17`
        `~1` is no range of versions: expected conditions such as `>=15, <17`
        `*` is no range of versions: expected conditions such as `>=15, <17`
        `1 2` is no range of versions: expected conditions such as `>=15, <17`
    "#]]
    .assert_eq(&said);
}
