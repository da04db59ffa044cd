//! Bundles on a machine that takes only signed images: each part is signed by itself.

use api::dominator::Status;
use testing::eventually;

use super::Site;
use crate::converges::CONVERGE_MAX;

/// Adds a bundle whose only file says `version`, signed by both.
fn add(site: &Site, version: &str) -> String {
    let name = format!("web/logd/{version}");
    let tree = site.at(&format!("bundle-{version}"));
    std::fs::create_dir_all(tree.join("opt")).unwrap();
    std::fs::write(tree.join("opt/logd"), version).unwrap();
    let (tree, key) = (tree.display().to_string(), site.path("alice"));
    site.imagetool(&["add", &name, &tree, "-", "-", "--sign", &key]);
    name
}

/// Requires an image, and waits until the machine refuses it. Returns why.
fn refused(site: &Site, image: &str) -> String {
    site.fleet.require(Some(image)).unwrap();
    eventually("the machine refuses it", || match site.fleet.statuses().unwrap().pop() {
        Some(sub) if sub.required_image == image && sub.status == Status::SignatureRefused => {
            Ok(sub.detail)
        }
        other => Err(other),
    })
}

#[test]
fn each_part_is_signed_and_not_older_than_what_came_before_in_its_place() {
    let mut site = Site::start();
    site.add_signed("web/1", "1");
    let first = add(&site, "1");
    let both = format!("web/1 + {first}");
    // One signature of two is not enough, whoever has signed the base.
    let why = refused(&site, &both);
    assert!(why.contains("1 of 2 signatures that count"), "{why}");
    assert_eq!(site.file("opt/logd"), "");
    site.sign_elsewhere(&first);
    Site::next_second();
    site.fleet.wait_synced(&both, CONVERGE_MAX, |_| {}).unwrap();
    assert_eq!((site.file("opt/logd").as_str(), site.file("etc/version").as_str()), ("1", "1"));
    let accepted = site.file(".subd/state/accepted.json");
    let accepted: serde_json::Value = serde_json::from_str(&accepted).unwrap();
    assert_eq!(accepted["image"], both);
    let lines = [("/", "web/1"), ("web/logd", first.as_str())];
    assert!(lines.iter().all(|(line, image)| accepted["lines"][line]["image"] == **image));

    // A newer base with the same bundle, which was signed before it; and a newer bundle.
    site.add_signed("web/2", "2");
    site.converge(&format!("web/2 + {first}"));
    let second = add(&site, "2");
    site.sign_elsewhere(&second);
    Site::next_second();
    site.converge(&format!("web/2 + {second}"));
    // Neither goes back by itself, also after the bundle has left.
    let newer = |why: &str| assert!(why.contains("a newer one was accepted before"), "{why}");
    newer(&refused(&site, &format!("web/2 + {first}")));
    newer(&refused(&site, &format!("web/1 + {second}")));
    site.converge("web/2");
    assert_eq!(site.file("opt/logd"), "");
    newer(&refused(&site, &format!("web/2 + {first}")));
    site.sign_again(&first);
    site.converge(&format!("web/2 + {first}"));
    assert_eq!(site.file("opt/logd"), "1");

    // Without the base the bundles stay, and go with their files.
    site.converge(&format!("(nothing) + {first}"));
    site.sign_again(&second);
    site.converge(&format!("(nothing) + {second}"));
    assert_eq!(site.file("opt/logd"), "2");
    site.converge("(nothing)");
    assert_eq!((site.file("opt/logd").as_str(), site.file("etc/version").as_str()), ("", "2"));
    site.converge(&format!("(nothing) + {second}"));
    site.converge("web/2");
    site.fleet.stop().unwrap();
}
