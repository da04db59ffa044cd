//! `domtool methods`: what is listed, and for whom.

use expect_test::expect;

use crate::certificates::{done, plain, run};

#[test]
fn all_methods_are_listed_with_who_may_call_them() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let some = [
        "methods",
        "Subd.Pause",
        "Subd.GetFiles",
        "*.DeleteImage",
        "Dominator.ListSubs",
        "MdbServer.GetMdbUpdates",
    ];
    expect![[r#"
         METHOD                   WHO MAY CALL IT                               SETS
         Dominator.ListSubs       any certificate                               all
         ImageServer.DeleteImage  a certificate with the power, or of an owner  none
         MdbServer.GetMdbUpdates  any certificate, in a later release           all
         Subd.GetFiles            a certificate with the power                  none
         Subd.Pause               a certificate with the power                  operator
        exit 0
    "#]]
    .assert_eq(&plain(&done(path, &some)));
    let output = done(path, &["methods", "--format", "json"]);
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let name = |row: &serde_json::Value| row["method"].as_str().unwrap().to_owned();
    let listed: Vec<String> = rows.as_array().unwrap().iter().map(name).collect();
    let all: Vec<&str> = api::methods().iter().map(|method| method.name).collect();
    assert_eq!(listed, all);
    let mut rows = rows.as_array().unwrap().iter();
    let got = rows.find(|row| row["method"] == "ObjectServer.CheckObjects").unwrap();
    let want = serde_json::json!({
        "method": "ObjectServer.CheckObjects", "service": "ObjectServer", "access": "authenticated",
        "effect": "tells", "reserved": false, "sets": ["dominator", "imageserver", "subd", "mdbd",
            "filegen-server",
            "operator", "uploader", "contributor", "viewer"],
    });
    assert_eq!(*got, want);
    assert_eq!(run(path, &["methods", "Nothing.Like"]).status.code(), Some(2));
}
