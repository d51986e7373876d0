// All DOM operations of this page. Text is inserted as text: data never becomes HTML.

/** The element of index.html with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new element with attributes and children (elements or text). */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Sets the text if it differs: equal text costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets an attribute if it differs; null removes it. */
export function setAttribute(element, name, value) {
  if (value == null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

/** Gives `parent` one child per item and fills each; elements are reused, so focus and hover are kept. */
export function fillList(parent, items, create, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, index) => {
    let child = parent.children[index];
    if (!child) {
      child = create();
      parent.append(child);
    }
    fill(child, item);
  });
}
