//! The page about the API: Swagger UI, from the archive that a crate of the registry contains. The
//! archive is unpacked at the first request. So the program contains 1.8 MB instead of 4.2, and no
//! build script unpacks anything.

use std::collections::HashMap;
use std::io::{Cursor, Read};
use std::sync::LazyLock;

use axum::body::Bytes;
use utoipa_swagger_ui_vendored::SWAGGER_UI_VENDORED;
use zip::ZipArchive;
use zip::result::ZipError;

pub(super) const INDEX: &str = "index.html";
const INITIALIZER: &str = "swagger-initializer.js";
/// The files that the page loads, each with its kind.
const FILES: [(&str, &str); 6] = [
    (INDEX, "text/html; charset=utf-8"),
    ("index.css", "text/css; charset=utf-8"),
    (INITIALIZER, "text/javascript; charset=utf-8"),
    ("swagger-ui-bundle.js", "text/javascript; charset=utf-8"),
    ("swagger-ui-standalone-preset.js", "text/javascript; charset=utf-8"),
    ("swagger-ui.css", "text/css; charset=utf-8"),
];
/// What the initializer of the archive loads.
const EXAMPLE: &str = "https://petstore.swagger.io/v2/swagger.json";
const ICON: &str = "../../console/icon.svg";
const DOCUMENT: &str = "../../openapi.json";

/// A file of the page. All answers share one copy of the bytes: a client may request the file many
/// times at once.
pub(super) struct File {
    pub(super) kind: &'static str,
    pub(super) bytes: Bytes,
}

/// Finds a file of the page by its name. `Ok(None)`: the page has no such file.
///
/// # Errors
/// The archive is damaged.
pub(super) fn file(name: &str) -> Result<Option<&'static File>, &'static ZipError> {
    static UNPACKED: LazyLock<Result<HashMap<&str, File>, ZipError>> = LazyLock::new(unpack);
    UNPACKED.as_ref().map(|files| files.get(name))
}

fn unpack() -> Result<HashMap<&'static str, File>, ZipError> {
    let mut archive = ZipArchive::new(Cursor::new(SWAGGER_UI_VENDORED))?;
    let root = archive.by_index(0)?.name()?.split('/').next().unwrap_or_default().to_owned();
    let mut files = HashMap::new();
    for (name, kind) in FILES {
        let mut bytes = Vec::new();
        archive.by_name(&format!("{root}/dist/{name}"))?.read_to_end(&mut bytes)?;
        let bytes = match name {
            INDEX => as_ours(&bytes),
            INITIALIZER => replaced(&bytes, EXAMPLE, DOCUMENT),
            _ => bytes,
        };
        files.insert(name, File { kind, bytes: bytes.into() });
    }
    Ok(files)
}

/// Gives the page the title, the styles and the bar of the documentation's pages.
fn as_ours(page: &[u8]) -> Vec<u8> {
    let page = replaced(page, "<title>Swagger UI</title>", "<title>API - redlock-gateway</title>");
    let page = String::from_utf8_lossy(&page)
        .replace("./favicon-16x16.png", ICON)
        .replace("./favicon-32x32.png", ICON)
        .replace("image/png", "image/svg+xml");
    let styles = "<link rel=\"stylesheet\" href=\"../pages.css\">\n</head>";
    let page = replaced(page.as_bytes(), "</head>", styles);
    let body = format!("<body class=\"docs\">\n{}", super::docs::bar("../"));
    replaced(&page, "<body>", &body)
}

fn replaced(text: &[u8], from: &str, to: &str) -> Vec<u8> {
    String::from_utf8_lossy(text).replacen(from, to, 1).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_our_document_and_links_to_ours() {
        let text = |name| {
            let file = file(name).expect("the archive is whole").expect("a file of the page");
            String::from_utf8(file.bytes.to_vec()).expect("text")
        };
        let index = text(INDEX);
        for ours in
            [&super::super::docs::bar("../"), "<title>API - ", "../pages.css", "<body class"]
        {
            assert!(index.contains(ours), "no {ours} in\n{index}");
        }
        assert!(text(INITIALIZER).contains(&format!("url: \"{DOCUMENT}\"")));
        assert!(!text(INITIALIZER).contains("petstore"));
        assert!(file("swagger-ui.js").expect("the archive is whole").is_none());
    }

    /// Every file that the page names is served.
    #[test]
    fn the_page_has_every_file_that_it_names() {
        let index = file(INDEX).expect("the archive is whole").expect("the page");
        let index = String::from_utf8_lossy(&index.bytes).into_owned();
        let named: Vec<&str> = ["href=\"", "src=\""]
            .iter()
            .flat_map(|start| index.split(start).skip(1))
            .filter_map(|rest| rest.split('"').next())
            .map(|name| name.trim_start_matches("./"))
            .filter(|name| name.contains('.') && !name.contains('/'))
            .collect();
        assert_eq!(named.len(), FILES.len() - 1, "{named:?}");
        for name in named {
            assert!(file(name).expect("the archive is whole").is_some(), "{name}");
        }
    }
}
