//! The binding file.

use expect_test::expect_file;
use provisioning::Bindings;

#[test]
fn a_kind_has_a_provisioner_and_a_user() {
    let bindings = Bindings::parse(
        r#"
        # Comments are taken.
        [[provisioner]]
        name = "sql"
        kinds = ["postgres", "mysql"]
        user = "postgres"
        timeout_s = 300

        [[provisioner]]
        name = "net"
        kinds = []
        user = "_net"
        "#,
    )
    .unwrap();
    let sql = bindings.of_kind("mysql").unwrap();
    assert_eq!((&*sql.name, &*sql.user, sql.timeout_s), ("sql", "postgres", 300));
    let net = bindings.of_name("net").unwrap();
    assert_eq!((net.kinds.len(), &*net.user, net.timeout_s), (0, "_net", 60));
    assert_eq!(bindings.of_kind("net"), None);
    assert!(bindings.bound_twice().is_empty());
    assert_eq!(Bindings::parse("").unwrap(), Bindings::default());
}

#[test]
fn what_cannot_be_bound_is_refused_with_the_line() {
    let one = |lines: &str| format!("[[provisioner]]\nname = 'a'\nkinds = ['k']\n{lines}\n");
    let files = [
        "provisioner = 1".to_owned(),
        "[provisioner".to_owned(),
        "[[provisoner]]\nname = 'a'".to_owned(),
        one(""),
        one("user = 'root'\nusr = 'x'"),
        one("user = 'root'\ntimeout = 5"),
        one("user = 'root'\ntimeout_s = 0"),
        one("user = 'root'\ntimeout_s = 3601"),
        one("user = 'root'\ntimeout_s = -1"),
        one("user = ''"),
        one("user = 'a b'"),
        one("user = 'root'\nname = 'b'"),
        one("user = 'root'") + &one("user = 'root'"),
        "[[provisioner]]\nname = '../a'\nkinds = ['k']\nuser = 'root'".to_owned(),
        "[[provisioner]]\nname = 'a'\nkinds = ['k', 'k']\nuser = 'root'".to_owned(),
        "[[provisioner]]\nname = 'a'\nkinds = ['k k']\nuser = 'root'".to_owned(),
        " ".repeat(65_537),
    ];
    let said: String =
        files.iter().map(|text| format!("{}\n", Bindings::parse(text).unwrap_err())).collect();
    expect_file!["refused_bindings.txt"].assert_eq(&said);
}
