//! Tests that make, list and remove directories and change their owners.

use super::*;

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn groups(groups: &[&str]) -> Owners {
    Owners::new(groups.iter().copied(), [])
}

fn at(seconds: i64) -> Time {
    Time { seconds, nanoseconds: 0 }
}

/// A store of these images.
struct Images(&'static [&'static str]);

impl Images {
    fn below(&self, directory: &ImageName) -> bool {
        self.0.iter().any(|image| is_below(&name(image), directory))
    }
}

fn make(
    directories: &mut Directories,
    images: &Images,
    text: &str,
    parents: bool,
    owners: Option<Owners>,
) -> Result<Vec<String>, String> {
    let name = name(text);
    let made = directories
        .to_make(&name, parents, |one| images.below(one))
        .and_then(|names| directories.make(&name, names, owners, at(7)));
    let made = made.map(|reply| reply.made.iter().map(ToString::to_string).collect());
    made.map_err(|error| error.to_string())
}

#[test]
fn what_is_missing_is_made() {
    let images = Images(&["web/prod/1", "web-old/1"]);
    let mut directories = Directories::default();
    let mut make = |text, parents, owners| make(&mut directories, &images, text, parents, owners);
    let ok = |names: &[&str]| Ok(names.iter().map(|name| (*name).to_owned()).collect());
    let no_parent = "there is no directory a/b to make a/b/c in: make that first, or ask for both";
    assert_eq!(make("a/b/c", false, None), Err(no_parent.to_owned()));
    assert_eq!(make("a", false, Some(groups(&["as"]))), ok(&["a"]));
    assert_eq!(make("a", false, None), Err("directory a exists already".to_owned()));
    assert_eq!(make("a", true, Some(groups(&["others"]))), ok(&[]));
    assert_eq!(make("a/b/c", true, Some(groups(&["cs"]))), ok(&["a/b", "a/b/c"]));
    assert_eq!(make("a/b/c/d", false, None), ok(&["a/b/c/d"]));
    // The image is in there, so the directory is, but nobody made it.
    assert_eq!(make("web/prod/x", true, None), ok(&["web/prod/x"]));
    assert_eq!(make("web", false, None), ok(&["web"]));
    let bad = make("b", false, Some(groups(&[""])));
    assert_eq!(bad, Err("directory b cannot have these owners".to_owned()));
    let table = [
        ("a", "group as"),
        ("a/b", "group as"),
        ("a/b/c", "group cs"),
        ("a/b/c/d", "group cs"),
        ("a/x/y", "group as"),
        ("web/prod", "nobody"),
        ("none", "nobody"),
    ];
    for (text, owners) in table {
        assert_eq!(directories.owners_of(&name(text)).in_words(), owners, "{text}");
    }
    let chain = directories.owned_above(&name("a/b/c/image"));
    let chain: Vec<&str> = chain.iter().map(|owned| owned.what.as_str()).collect();
    assert_eq!(chain, ["directory a/b/c", "directory a/b", "directory a"]);
}

#[test]
fn only_what_is_empty_is_removed() {
    let images = Images(&["a/1", "a-b/1"]);
    let mut directories = Directories::default();
    for text in ["a/b/c", "a-b", "x"] {
        make(&mut directories, &images, text, true, None).unwrap();
    }
    let mut remove = |text: &str, images| {
        let removed = directories.remove(&name(text), images);
        removed.map_err(|error| error.to_string())
    };
    let not = |text: &str| Err(text.to_owned());
    assert_eq!(remove("none", 0), not("there is no directory none"));
    // It is there by what is in it, so that is what hinders.
    let text = "directory a is not empty: it has 1 image, and 2 directories below it";
    assert_eq!(remove("a", 1), not(text));
    let text = "directory a/b is not empty: it has 1 directory below it";
    assert_eq!(remove("a/b", 0), not(text));
    let text = "directory a-b is not empty: it has 2 images in it or below";
    assert_eq!(remove("a-b", 2), not(text));
    for text in ["a/b/c", "a/b", "a-b", "x"] {
        assert_eq!(remove(text, 0), Ok(()), "{text}");
    }
    assert_eq!(directories, Directories::default());
}

#[test]
fn what_is_there_is_given_away() {
    let images = Images(&["a/b/1"]);
    let mut directories = Directories::default();
    make(&mut directories, &images, "x", false, Some(groups(&["xs"]))).unwrap();
    let mut give = |text: &str, owners: &[&str]| {
        let given = directories.give(&name(text), groups(owners), at(9), |one| images.below(one));
        given.map_err(|error| error.to_string())
    };
    assert_eq!(give("none", &["g"]), Err("there is no directory none".to_owned()));
    assert_eq!(give("a/b/1", &["g"]), Err("there is no directory a/b/1".to_owned()));
    assert_eq!(give("x", &["\n"]), Err("directory x cannot have these owners".to_owned()));
    assert_eq!(give("x", &["g"]), Ok(()));
    assert_eq!(give("a", &["as"]), Ok(()));
    assert_eq!(
        directories.get(&name("x")).unwrap(),
        &Made { owners: groups(&["g"]), made_on: at(7), ..Made::default() }
    );
    let made = Made { owners: groups(&["as"]), made_on: at(9), ..Made::default() };
    assert_eq!(directories.get(&name("a")).unwrap(), &made);
    assert_eq!(directories.expect_made(&name("a/1")), Ok(()));
    assert_eq!(directories.expect_made(&name("top")), Ok(()));
    let demanded = DirectoryError::NotMade { directory: name("a/b") };
    assert_eq!(directories.expect_made(&name("a/b/2")), Err(demanded));
}

#[test]
fn a_list_has_every_directory_before_what_is_in_it() {
    let mut directories = Directories::default();
    let images = Images(&[]);
    for (text, owner) in [("a/b", "bs"), ("a-b", "others"), ("c", "cs")] {
        make(&mut directories, &images, text, true, Some(groups(&[owner]))).unwrap();
    }
    let mut sums = Sums::default();
    for (image, bytes) in [("a/1", 1), ("a/b/1", 10), ("a/b/2", 100), ("d/e/1", 1_000), ("top", 9)]
    {
        sums.count(&name(image), bytes);
    }
    let list = |below: Option<&str>, after: Option<&str>, limit| {
        let (below, after) = (below.map(name), after.map(name));
        let (list, more) =
            directories.list(|_| true, &sums, (below.as_ref(), after.as_ref()), limit);
        let mut lines: Vec<String> = list
            .iter()
            .map(|one| {
                let how = if one.made_on.is_some() { "made" } else { "there" };
                let DirectorySummary { name, images, images_below, bytes_below, .. } = one;
                let owners = one.owners.in_words();
                format!("{name} {how} {images} {images_below} {bytes_below} {owners}")
            })
            .collect();
        lines.extend(more.then(|| "more".to_owned()));
        lines
    };
    let all = [
        "a made 1 3 111 nobody",
        "a/b made 2 2 110 group bs",
        "a-b made 0 0 0 group others",
        "c made 0 0 0 group cs",
        "d there 0 1 1000 nobody",
        "d/e there 1 1 1000 nobody",
    ];
    assert_eq!(list(None, None, 9), all);
    assert_eq!(list(Some("a"), None, 9), all[..2]);
    assert_eq!(list(Some("a-b"), None, 9), all[2..3]);
    assert_eq!(list(None, Some("a/b"), 9), all[2..]);
    assert_eq!(list(None, None, 1), [all[0], "more"]);
    assert_eq!(list(Some("none"), None, 9), Vec::<String>::new());
}
