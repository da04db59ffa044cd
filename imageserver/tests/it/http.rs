//! `GET /objects/<id>` and the pages, as browsers, caches and curl see them.

use api::fault::FaultCode;
use imageserver::store::layout;
use model::filter::Filter;

use crate::fixture::{ALGORITHM, Server, image_of, rename_stored, tree_of, tree_with_computed};

#[tokio::test]
async fn an_object_is_given_whole_and_in_parts() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let small: Vec<u8> = (0..1_000u32).map(|index| index as u8).collect();
    let large: Vec<u8> = (0..1_000_000u32).map(|index| (index >> 3) as u8).collect();
    server.upload(&[&small, &large, b""]).await;
    for content in [&small, &large] {
        let id = ALGORITHM.digest(content);
        let path = format!("/objects/{id}");
        let whole = server.get(&path, "");
        assert_eq!((whole.status, &whole.body), (200, content));
        let length = content.len().to_string();
        let etag = format!("\"{id}\"");
        #[rustfmt::skip]
        let headers = [
            ("content-type", "application/octet-stream"), ("content-length", &length),
            ("etag", &etag), ("cache-control", "public, max-age=31536000, immutable"),
            ("accept-ranges", "bytes"),
        ];
        for (header, value) in headers {
            assert_eq!(whole.header(header), Some(value), "{header}");
        }

        let last = content.len() - 1;
        #[rustfmt::skip]
        let table = [
            ("bytes=0-0",     0,        0),
            ("bytes=10-19",   10,       19),
            ("bytes=990-",    990,      last),
            ("bytes=-7",      last - 6, last),
            ("bytes=5-99999999", 5,     last),
        ];
        for (range, first, last) in table {
            let part = server.get(&path, &format!("Range: {range}\r\n"));
            assert_eq!((part.status, &part.body[..]), (206, &content[first..=last]), "{range}");
            let expected = format!("bytes {first}-{last}/{length}");
            assert_eq!(part.header("content-range"), Some(&*expected));
        }
        let behind = server.get(&path, &format!("Range: bytes={length}-\r\n"));
        assert_eq!((behind.status, behind.body.len()), (416, 0));
        assert_eq!(behind.header("content-range"), Some(&*format!("bytes */{length}")));
        let known = server.get(&path, &format!("If-None-Match: \"{id}\"\r\n"));
        assert_eq!((known.status, known.body.len()), (304, 0));
    }
    let empty = server.get(&format!("/objects/{}", ALGORITHM.digest(b"")), "");
    assert_eq!((empty.status, empty.body.len()), (200, 0));
}

#[tokio::test]
async fn what_is_no_object_is_said_to_be() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let absent = server.get(&format!("/objects/{}", ALGORITHM.digest(b"absent")), "");
    assert_eq!(absent.status, 404);
    for bad in ["x", "", "blake3:..%2f..%2flock", "../lock", "%2e%2e/lock", "blake3:abc"] {
        assert_eq!(server.get(&format!("/objects/{bad}"), "").status, 400, "{bad}");
    }
}

#[tokio::test]
async fn pages_show_images_and_escape_hostile_names() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let empty = server.get("/", "").text();
    assert!(empty.contains("None yet.") && empty.contains("INSECURE"), "{empty}");

    let tree = tree_of(&[("/etc/motd", b"hello")]);
    server.upload_tree(&tree, &[b"hello"]).await;
    let hostile = "<script>alert(1)</script>\"&amp;%2f";
    let mut content = image_of("plain", &tree);
    content.filter = Some(Filter::new(["/var/<b>.*"]).unwrap());
    server.add(content).await.unwrap();
    server.kill();
    rename_stored(data.path(), "plain", hostile);
    let server = Server::start(data.path());
    let page = server.get("/", "");
    assert_eq!(page.status, 200);
    assert!(!page.text().contains("<script>"), "{}", page.text());

    let text = page.text();
    let start = text.find("/image?name=").unwrap();
    let link = &text[start..start + text[start..].find('"').unwrap()];
    let page = server.get(link, "");
    assert_eq!(page.status, 200);
    let text = page.text();
    assert!(!text.contains("<script>") && !text.contains("<b>."), "{text}");
    for part in [tree.digest().to_string(), "5 bytes".to_owned(), "/var/&#60;b&#62;.*".to_owned()] {
        assert!(text.contains(&part), "{part} in {text}");
    }

    assert_eq!(server.get("/image", "").status, 400);
    assert_eq!(server.get("/image?name=..", "").status, 400);
    assert_eq!(server.get("/image?name=other", "").status, FaultCode::NotFound.status());
    assert_eq!(server.get("/healthz", "").text(), "ok\n");
    assert_eq!(server.metric("dominator_images"), "1");
}

#[tokio::test]
async fn pages_show_computed_files_with_their_sources() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_with_computed();
    server.upload_tree(&tree, &[b"a"]).await;
    server.add(image_of("a", &tree)).await.unwrap();
    let page = server.get("/image?name=a", "").text();
    let row = "<tr><th scope=\"row\">/etc/issue</th><td>filegen:6972</td></tr>";
    assert!(page.contains("<h2>Computed files</h2>") && page.contains(row), "{page}");
    let list = server.get("/", "").text();
    let row: Vec<&str> = list.lines().filter(|line| line.contains("/image?name=a\"")).collect();
    let [row] = row[..] else { panic!("{list}") };
    let numbers: Vec<&str> = row.split("<td class=\"number\">").skip(1).collect();
    let numbers: Vec<&str> =
        numbers.iter().filter_map(|cell| cell.split_once("</td>")).map(|(text, _)| text).collect();
    // Entries, size, lines of the filter, triggers, computed files.
    assert_eq!(numbers, ["3", "1 byte", "0", "0", "1"]);
}

#[tokio::test]
async fn objects_of_former_runs_are_counted() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    server.upload(&[b"one", b"three"]).await;
    server.kill();
    // The clock was a day ahead when they came.
    let tomorrow = std::time::SystemTime::now() + std::time::Duration::from_hours(24);
    for content in [&b"one"[..], b"three"] {
        let path = layout::object_path(&ALGORITHM.digest(content));
        let object = std::fs::File::open(data.path().join("objects").join(path)).unwrap();
        object.set_modified(tomorrow).unwrap();
    }
    let server = Server::start(data.path());
    server.upload(&[b"seventeen"]).await;
    let counted = || server.metric("dominator_objects") == "3";
    let begun = std::time::Instant::now();
    while !counted() {
        assert!(begun.elapsed().as_secs() < 10, "{}", server.metric("dominator_objects"));
    }
    assert_eq!(server.metric("dominator_objects_bytes"), "17");
}
