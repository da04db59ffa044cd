//! What browsers are told, whatever they ask for; and who may see pages.

use std::net::SocketAddr;

use rpc::audit_log::AuditLog;
use rpc::page_frame::STYLE_HASH;

use crate::wire::{Server, raw, router};

/// The headers that every response has.
const EVERYWHERE: [&str; 6] = [
    "x-content-type-options: nosniff",
    "referrer-policy: no-referrer",
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
