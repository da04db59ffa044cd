//! What browsers are told, whatever they ask for; and who may see pages.

use std::net::SocketAddr;

use api::fault::{Fault, FaultCode};
use api::subd::{Commit, CommitRequest};
use api::{PROTOCOL, PROTOCOL_HEADER};
use rpc::audit_log::AuditLog;
use rpc::page_frame::STYLE_HASH;
use rpc::server::Page;

use crate::wire::{Server, raw, router};

/// The headers that every response has which a browser may get.
const EVERYWHERE: [&str; 6] = [
    "x-content-type-options: nosniff",
    "referrer-policy: same-origin",
    "x-frame-options: DENY",
    "cross-origin-opener-policy: same-origin",
    "cross-origin-resource-policy: same-origin",
    "permissions-policy: camera=(), geolocation=(), microphone=(), payment=(), usb=()",
];

async fn ask(address: SocketAddr, verb: &str, path: &str, headers: &str) -> String {
    let request = format!(
        "{verb} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\
         {headers}\r\n"
    );
    raw(address, request.as_bytes()).await
}

#[tokio::test]
async fn every_response_is_harmless_in_a_browser() {
    let server = Server::start(router().audit(&AuditLog::none())).await;
    let json = "content-type: application/json\r\n";
    #[rustfmt::skip]
    let table = [
        ("GET",     "/audit",                     "", "200", true),
        ("HEAD",    "/audit",                     "", "200", true),
        ("GET",     "/healthz",                   "", "200", false),
        ("GET",     "/metrics",                   "", "200", false),
        ("GET",     "/objects/x",                 "", "404", true),
        ("GET",     "/nowhere",                   "", "404", true),
        ("GET",     "/%ff",                       "", "400", true),
        ("POST",    "/",                          "", "405", true),
        ("PUT",     "/audit",                     "", "405", true),
        ("DELETE",  "/audit",                     "", "405", true),
        ("OPTIONS", "/audit",                     "", "405", true),
        ("GET",     "/rpc/Subd.GetConfiguration", "", "405", true),
        ("POST",    "/rpc/Subd.GetConfiguration", json, "200", false),
        ("POST",    "/rpc/Subd.Nothing",          json, "404", false),
        ("POST",    "/rpc/Subd.GetConfiguration", "sec-fetch-site: cross-site\r\n", "403", true),
        ("POST",    "/rpc/Subd.GetConfiguration", "sec-fetch-site: same-site\r\n", "403", true),
        ("OPTIONS", "/rpc/Subd.GetConfiguration", "origin: http://evil\r\n", "405", true),
    ];
    for (verb, path, headers, status, is_page) in table {
        let response = ask(server.address, verb, path, headers).await;
        assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{verb} {path}: {response}");
        for header in EVERYWHERE {
            assert!(response.contains(header), "{verb} {path} lacks {header}: {response}");
        }
        let policy = if is_page {
            format!(
                "content-security-policy: default-src 'none'; style-src '{STYLE_HASH}'; \
                 form-action 'self'; base-uri 'none'; frame-ancestors 'none'\r\n"
            )
        } else {
            "content-security-policy: default-src 'none'; frame-ancestors 'none'; sandbox\r\n"
                .to_owned()
        };
        assert!(response.contains(&policy), "{verb} {path}: {response}");
        assert!(response.contains("cache-control: no-store\r\n"), "{verb} {path}: {response}");
        assert!(!response.contains("access-control-allow"), "{verb} {path}: {response}");
    }
    let content = ask(server.address, "GET", "/objects/digits", "").await;
    assert!(content.contains("content-type: application/octet-stream"), "{content}");
    // Without this header no call in bincode is answered, and no page of another site can set it.
    let bincode = "content-type: application/octet-stream\r\n";
    let refused = ask(server.address, "POST", "/rpc/Subd.GetConfiguration", bincode).await;
    assert!(refused.starts_with("HTTP/1.1 400 "), "{refused}");
    let version = format!("{bincode}{PROTOCOL_HEADER}: {PROTOCOL}\r\n");
    let reply = ask(server.address, "POST", "/rpc/Subd.GetConfiguration", &version).await;
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    for header in EVERYWHERE {
        assert!(content.contains(header), "an object lacks {header}: {content}");
        assert!(!reply.contains(header), "a reply for programs has {header}: {reply}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_browser_shows_the_metrics() {
    let server = Server::start(router().audit(&AuditLog::none())).await;
    let proper = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    for (accepted, kind) in [
        ("", proper),
        ("accept: application/openmetrics-text\r\n", proper),
        ("accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n", "text/plain; charset=utf-8"),
    ] {
        let response = ask(server.address, "GET", "/metrics", accepted).await;
        assert!(response.contains(&format!("content-type: {kind}\r\n")), "{response}");
    }
    server.stop().await;
}

#[tokio::test]
async fn private_pages_need_a_certificate_and_health_does_not() {
    let router = router().audit(&AuditLog::none()).private_pages(true);
    let server = Server::start(router).await;
    for path in ["/", "/audit", "/metrics", "/nowhere", "//healthz", "/healthz/", "/objects/x"] {
        let response = ask(server.address, "GET", path, "").await;
        assert!(response.starts_with("HTTP/1.1 403 "), "{path}: {response}");
        assert!(response.contains("only to those who have a certificate"), "{path}: {response}");
    }
    let response = ask(server.address, "GET", "/healthz", "").await;
    assert!(response.starts_with("HTTP/1.1 200 ") && response.ends_with("\r\n\r\nok\n"));
    let json = "content-type: application/json\r\n";
    let response = ask(server.address, "POST", "/rpc/Subd.GetConfiguration", json).await;
    assert!(response.starts_with("HTTP/1.1 200 "), "calls have rules of their own: {response}");
    server.stop().await;
}

/// Sends a form as a browser does.
async fn send_form(address: SocketAddr, headers: &str, fields: &str) -> String {
    let length = fields.len();
    let request = format!(
        "POST /commit HTTP/1.1\r\nhost: x:1\r\nconnection: close\r\ncontent-length: {length}\r\n\
         {headers}\r\n{fields}"
    );
    raw(address, request.as_bytes()).await
}

#[tokio::test]
async fn a_form_with_a_proof_needs_no_certificate() {
    let router = router()
        .private_pages(true)
        .page("/commit", async |(), request| Ok(Page::Text(request.form_token)))
        .form_with_proof::<Commit>("/commit", |(), fields| match fields.get("proof") {
            Some("good") => {
                Ok((CommitRequest { update_id: 7 }, "/done".to_owned(), "bob".to_owned()))
            }
            _ => Err(Fault::new(FaultCode::Denied, "a wrong proof")),
        });
    let server = Server::start(router).await;
    let page = ask(server.address, "GET", "/commit", "").await;
    let token = page.rsplit("\r\n").next().unwrap().to_owned();
    assert!(page.starts_with("HTTP/1.1 200 ") && token.len() == 64, "{page}");
    let own = "content-type: application/x-www-form-urlencoded\r\norigin: https://x:1\r\n";
    let evil = own.replace("x:1", "evil");
    #[rustfmt::skip]
    let table = [
        (own,   format!("token={token}&proof=good"), "303"),
        (own,   format!("token={token}&proof=bad"),  "403"),
        (own,   "proof=good".to_owned(),             "403"),
        (&evil, format!("token={token}&proof=good"), "403"),
    ];
    for (headers, fields, status) in table {
        let response = send_form(server.address, headers, &fields).await;
        let is_expected = response.starts_with(&format!("HTTP/1.1 {status} "));
        assert!(is_expected, "{headers} {fields}: {response}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_form_is_only_taken_from_a_page_of_this_server() {
    let router = router()
        .page("/token", async |(), request| Ok(Page::Text(request.form_token)))
        .form::<Commit>("/commit", |fields| {
        let update_id = fields.get("id").and_then(|id| id.parse().ok());
        let missing = || Fault::new(FaultCode::BadRequest, "which update?");
        let request = CommitRequest { update_id: update_id.ok_or_else(missing)? };
        Ok((request, "/done".to_owned()))
    });
    let server = Server::start(router).await;
    let page = ask(server.address, "GET", "/token", "").await;
    let token = page.rsplit("\r\n").next().unwrap().to_owned();
    assert_eq!(token.len(), 64, "{page}");
    let kind = "content-type: application/x-www-form-urlencoded\r\n";
    let own = format!("{kind}origin: https://x:1\r\n");
    let good = format!("token={token}&id=7");
    #[rustfmt::skip]
    let table = [
        (own.clone(),                                    good.clone(),                    "303"),
        (format!("{own}sec-fetch-site: same-origin\r\n"), good.clone(),                    "303"),
        (format!("{own}sec-fetch-site: cross-site\r\n"),  good.clone(),                    "403"),
        (format!("{kind}origin: https://evil\r\n"),       good.clone(),                    "403"),
        (format!("{kind}origin: null\r\n"),               good.clone(),                    "403"),
        (kind.to_owned(),                                good.clone(),                    "403"),
        ("origin: https://x:1\r\n".to_owned(),            good.clone(),                    "403"),
        (own.clone(),                                    "id=7".to_owned(),               "403"),
        (own.clone(),                                    format!("token={token}0&id=7"),  "403"),
        (own.clone(),                                    format!("token={:064}&id=7", 0), "403"),
        (own.clone(),                                    format!("token={token}"),        "400"),
        // What the method says.
        (own.clone(),                                    format!("token={token}&id=0"),   "404"),
        (own.clone(),                                    format!("token={token}&id=1"),   "500"),
        (own.clone(),                                    "\u{fffd}=&id=7".to_owned(),     "403"),
    ];
    for (headers, fields, status) in table {
        let response = send_form(server.address, &headers, &fields).await;
        let is_expected = response.starts_with(&format!("HTTP/1.1 {status} "));
        assert!(is_expected, "{headers} {fields}: {response}");
        let is_done = response.contains("location: /done\r\n");
        assert_eq!(is_done, status == "303", "{headers} {fields}: {response}");
    }
    let response = ask(server.address, "GET", "/commit?id=7", "").await;
    assert!(response.starts_with("HTTP/1.1 404 "), "a link does nothing: {response}");
    server.stop().await;
}
